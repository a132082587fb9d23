"""The speculators package on a CPU reads our EAGLE-3 file: its stages against ours."""

import draft_samples as samples
import pytest
import tiny
import torch
from eagle3_drafts import over_all
from safetensors.torch import load_file

from outpace.bench.stages import eagle3_feature, eagle3_stages
from outpace.drafts.eagle3_decode import BoundEagle3, TreeShape
from outpace.formats.export import export_draft
from outpace.formats.load import build_draft

theirs = pytest.importorskip(
    "speculators.models.eagle3.core",
    reason="the speculators package, or something it imports, is not installed",
    exc_type=ImportError,
)

parallel = pytest.importorskip("speculators.models.peagle.core", exc_type=ImportError)

T, LAST, STEPS = 13, 77, 3
AT = 8  # the index where the walk is compared: what it reads in three steps is text
PARTS = {
    "fc": lambda m: m.fc,
    "attention 0": lambda m: m.layers[0].self_attn.o_proj,
    "mlp 0": lambda m: m.layers[0].mlp,
    "before the head": lambda m: m.norm,
    "logits": lambda m: m.lm_head,
}


class Forced:
    """States the true text, and keeps what it was asked with."""

    def __init__(self, truth):
        self.truth, self.logits = truth, []

    def tokens(self, logits, depth):
        self.logits.append(logits[0, 0])
        return torch.tensor([[self.truth[depth - 1]]]), None


def opened(draft, folder, files, kind=theirs.Eagle3DraftModel):
    """Their model with the tensors of our export -> it, and what each part gave, call by call."""
    export_draft(draft, "speculators-eagle3", folder, files)
    config = kind.config_class.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "eager"  # flex attention needs a compiler
    model = kind(config).eval()
    result = model.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
    assert not result.unexpected_keys and all("verifier" in name for name in result.missing_keys)
    values = {name: [] for name in PARTS}
    for name, part in PARTS.items():
        part(model).register_forward_hook(lambda m, i, out, name=name: values[name].append(out[0]))
    return model, values


@pytest.mark.parametrize("variant", [v for v in samples.EAGLE3S if v != "narrow" and "pass" not in v])
@torch.inference_mode()
def test_an_eagle3_stage_by_stage(variant, tmp_path):
    draft, files = samples.eagle3(**samples.EAGLE3S[variant]), samples.target_files(tmp_path / "target")
    model, recorded = opened(draft, tmp_path / "draft", files)
    c, w, hs, text = draft.config, draft.tensors, samples.hidden_states(T), tiny.tokens(1, T)
    states = [hs[k + 1] for k in c.layer_ids]
    following = torch.cat((text[:, 1:], torch.tensor([[LAST]])), dim=1)
    where = {"position_ids": torch.arange(T)[None], "ttt_steps": STEPS}
    model(torch.cat(states, -1)[None], following, torch.zeros(1, T, dtype=torch.long), **where)

    embedding, head = (
        w.get("embed_tokens.weight", samples.embedding()),
        w.get("lm_head.weight", samples.head()),
    )
    stages = eagle3_stages(w, c, eagle3_feature(w, c, states), embedding[following[0]], 0, head)
    for name in PARTS:
        torch.testing.assert_close(recorded[name][0].double(), stages[name], atol=1e-4, rtol=1e-4)

    # the walk from one index on: every later step reads its own state and the true token
    bound = BoundEagle3(build_draft(draft), samples.target(), TreeShape(depth=STEPS))
    session, forced = bound.begin(1, 64), Forced(following[0, AT + 1 :].tolist())
    session.observe(text[:, : AT + 1], torch.stack(states)[:, None, : AT + 1], [AT + 1])
    session.propose(following[:, AT], STEPS + 1, forced)
    # their window stays at the index while the walk goes on: past it, they train what nobody serves
    for step in range(1 if c.sliding_window else STEPS):
        wanted = over_all(bound.draft, recorded["logits"][step][AT])
        torch.testing.assert_close(forced.logits[step], wanted, atol=1e-4, rtol=1e-4)


class Recorder(Exception):
    """Their forward goes on to a loss, which is not asked for."""


@pytest.mark.parametrize("changes", [{}, {"num_layers": 3, "fc_norm": True}, {"sliding_window": 5}])
@torch.inference_mode()
def test_guesses_in_one_pass(changes, tmp_path, monkeypatch):
    """Theirs is for training: with every index at depth 0 and one chain of masks it is our one pass."""
    draft = samples.eagle3(parallel=True, mask_token_id=samples.MASK, **changes)
    files = samples.target_files(tmp_path / "target")
    model, recorded = opened(draft, tmp_path / "draft", files, parallel.PEagleDraftModel)
    chain = torch.arange(1, STEPS)
    places = (
        torch.cat((torch.arange(T), torch.full_like(chain, AT))),
        torch.cat((torch.zeros(T), chain)).long(),
    )
    monkeypatch.setattr(parallel, "generate_cod_sample_indices", lambda **message: places)

    def stop(*given):
        raise Recorder

    model.lm_head.register_forward_hook(stop)
    c, hs, text = draft.config, samples.hidden_states(T), tiny.tokens(1, T)
    states = [hs[k + 1] for k in c.layer_ids]
    following = torch.cat((text[:, 1:], torch.tensor([[LAST]])), dim=1)
    with pytest.raises(Recorder):
        model(torch.cat(states, -1)[None], following, torch.zeros(1, T, dtype=torch.long),
              verifier_last_hidden_states=hs[-1][None])  # fmt: skip

    bound = BoundEagle3(build_draft(draft), samples.target(), TreeShape(depth=STEPS))
    session, value = bound.begin(1, 64), Listening()
    session.observe(text[:, : AT + 1], torch.stack(states)[:, None, : AT + 1], [AT + 1])
    session.propose(following[:, AT], STEPS + 1, value)
    wanted = recorded["logits"][0][[AT, *range(T, T + STEPS - 1)]]
    torch.testing.assert_close(value.logits, over_all(bound.draft, wanted), atol=1e-4, rtol=1e-4)


class Listening:
    def tokens(self, logits, depth):
        self.logits = logits[0]
        return logits.argmax(-1), None
