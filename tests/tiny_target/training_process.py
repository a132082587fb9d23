"""One of the processes that train a micro target together: OUT."""

import sys
from pathlib import Path

sys.path += [str(Path(__file__).parents[n]) for n in (1, 2)]
from test_problem_training import MICRO, MIX

from examples.tiny_target.make import ALONE
from examples.tiny_target.problem_rows import sample_pieces
from examples.tiny_target.problem_training import ProblemRecipe, train_target
from outpace.ops import ranks
from outpace.text.tokenizer import train_bpe

if __name__ == "__main__":
    with ranks.joined():
        assert ranks.size() == 2
        words = train_bpe(sample_pieces(1, 40), MICRO["vocab_size"], alone=ALONE)
        train_target(ProblemRecipe(**MICRO, mix=MIX), words, Path(sys.argv[1]))
