"""What the engine's thread says of answers, as it reaches the event loop."""

import asyncio

import pytest

import outpace
from outpace.api import OutputRow, StreamPiece
from outpace.decode.params import SamplingParams
from outpace.serve import answer as module
from outpace.serve.answer import Answer, Outbox
from outpace.serve.stream import joined
from outpace.text.chat_format import ChatPart


@pytest.fixture(scope="module")
def model():
    return outpace.load()


def _answer(model, outbox, index=0):
    row = OutputRow(model, "A word", SamplingParams(max_tokens=50))
    return Answer(row, index, None, outbox)


def _taken(answer):
    """What `pieces` gives now, without waiting for more."""
    tokens = [piece.token for piece in answer.new[0]]
    answer.new = [], []
    return tokens


def test_tokens_wait_for_one_another_but_the_first_and_the_end_do_not(model, monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(module.time, "perf_counter", lambda: clock[0])

    async def run():
        outbox = Outbox()
        one, two = _answer(model, outbox), _answer(model, outbox, 1)

        async def round_(answer, *tokens, later=0.0):
            clock[0] += later
            answer.feed(list(tokens))
            outbox.hand_over()
            await asyncio.sleep(0)
            return _taken(answer)

        assert await round_(one, 40) == [40]  # the first goes at once
        assert await round_(one, 41, 42) == []
        assert await round_(one, 43, later=2 * module.HOLD_SECONDS) == [41, 42, 43]
        assert await round_(one, 44) == []
        assert await round_(two, 50) == [50] and _taken(one) == [44]  # together with another's first
        assert await round_(two, 51) == []
        one.end(None)
        outbox.hand_over()
        await asyncio.sleep(0)
        assert one.over and not two.over and _taken(two) == [51]

    asyncio.run(run())


@pytest.mark.parametrize("error", [None, ValueError("of its draft")])
def test_what_came_before_the_end_is_taken_before_it(model, error):
    """Tokens, the end and its error, put while nobody waits, are all there for who comes later."""

    async def run():
        outbox = Outbox()
        answer = _answer(model, outbox)
        answer.feed([40, 41])
        answer.end(error)
        outbox.hand_over()
        got = []
        try:
            async for pieces, _ in answer.pieces():
                got += [piece.token for piece in pieces]
        except ValueError as raised:
            assert raised is error
        else:
            assert error is None
        assert got == [40, 41] == [piece.token for piece in answer.seen]

    asyncio.run(run())


@pytest.mark.parametrize("taken_first", [False, True])
def test_an_answer_that_ends_while_nobody_waits_is_taken_whole(model, taken_first):
    """It is delivered before the first wait, or while its consumer works at an earlier piece."""

    async def run():
        outbox, got = Outbox(), []
        answer = _answer(model, outbox)

        async def deliver(*tokens):
            answer.feed(list(tokens))
            outbox.hand_over()
            await asyncio.sleep(0)

        async def finish():
            await deliver(42, 43)
            answer.end(None)
            outbox.hand_over()
            await asyncio.sleep(0)
            assert answer.over

        await (deliver(40, 41) if taken_first else finish())
        async for pieces, _ in answer.pieces():
            got += [piece.token for piece in pieces]
            if taken_first and len(got) == 2:
                await finish()
        assert got == ([40, 41] if taken_first else []) + [42, 43]

    asyncio.run(run())


def test_pieces_of_one_message_go_out_as_one(model):
    async def run():
        outbox = Outbox()
        one, two = _answer(model, outbox), _answer(model, outbox, 1)

        def piece(text, part=None, **more):
            return StreamPiece(text=text, token=1, drafted=False, part=part, **more)

        def part(kind, index, text):
            return ChatPart(kind=kind, text=text, index=index)

        some = [
            (one, piece("", part("analysis", 0, "I ")), []),
            (one, piece("", part("analysis", 0, "see")), []),
            (one, piece("A", part("final", 1, "A")), []),
            (two, piece("B", part("final", 1, "B")), []),
            (one, piece(" b", part("final", 1, " b")), []),
            (one, piece(" c", part("final", 1, " c STOP"), finish_reason="stop"), []),
        ]
        assert [(a.index, p.text, p.part.text, p.finish_reason) for a, p, _ in joined(some)] == [
            (0, "", "I see", None),
            (0, "A", "A", None),
            (1, "B", "B", None),
            (0, " b c", " b c STOP", "stop"),
        ]
        plain = [(one, piece("x"), []), (one, piece("y"), [])]
        assert [p.text for _, p, _ in joined(plain)] == ["xy"]

    asyncio.run(run())
