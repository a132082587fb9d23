"""llama.cpp itself runs the GGUF drafts we write, the target lending embedding and head: same logits."""

import ctypes

import draft_samples as samples
import numpy as np
import pytest
import tiny
import torch
from test_formats import LAST, REFUSED, our_block, our_chain

from outpace.formats.convert import write_gguf
from outpace.formats.export import export_draft

L = pytest.importorskip("llama_cpp.llama_cpp", reason="the oracle extra (llama-cpp-python) is not installed")
NEXTN = "_Z26llama_get_embeddings_nextnP13llama_context"
SET_NEXTN = "_Z26llama_set_embeddings_nextnP13llama_contextbb"
if not hasattr(L, "llama_batch_ext_init") or not hasattr(L._lib, NEXTN):
    pytest.skip("this llama-cpp-python has no drafts with hidden states", allow_module_level=True)
SIZE = 64


class Context:
    """A model file in one context; float32 keys and values, one thread."""

    def __init__(self, path, other=None):
        self.model = L.llama_model_load_from_file(str(path).encode(), L.llama_model_default_params())
        assert self.model, path
        params = L.llama_context_default_params()
        params.n_ctx = params.n_batch = params.n_ubatch = SIZE
        params.n_threads = params.n_threads_batch = 1
        params.type_k = params.type_v = params.flash_attn_type = 0
        params.swa_full = True
        params.ctx_other = other and other.context
        self.context = L.llama_init_from_model(self.model, params)
        assert self.context
        self.batch, self.kept = L.llama_batch_ext_init(self.context), []

    def add(self, position, *, token=None, state=None, out=False):
        if token is None:
            at = L.llama_batch_ext_add_embd(self.batch, 0, self._state(state))
        else:
            at = L.llama_batch_ext_add_token(self.batch, 0, int(token))
            assert state is None or L.llama_batch_ext_set_embd_token(self.batch, at, self._state(state))
        assert at >= 0
        assert L.llama_batch_ext_set_pos(self.batch, at, (ctypes.c_int * 4)(position, position, position, 0))
        L.llama_batch_ext_set_output_logits(self.batch, at, out)

    def _state(self, row):
        row = np.ascontiguousarray(row, dtype=np.float32)
        self.kept.append(row)
        return L.llama_embd(row.ctypes.data_as(ctypes.POINTER(ctypes.c_float)), 1, row.shape[-1])

    def run(self, encode=False):
        kind = L.LLAMA_PROCESS_TYPE_ENCODE if encode else L.LLAMA_PROCESS_TYPE_DECODE
        assert L.llama_process(self.context, kind, self.batch) == 0
        L.llama_batch_ext_clear(self.batch)
        self.kept = []

    def logits(self, i):
        return torch.tensor(
            np.ctypeslib.as_array(L.llama_get_logits_ith(self.context, i), (samples.VOCAB,)).copy()
        )

    def states(self, rows, width):
        get = getattr(L._lib, NEXTN)
        get.restype, get.argtypes = ctypes.POINTER(ctypes.c_float), [ctypes.c_void_p]
        return np.ctypeslib.as_array(get(self.context), (rows, width)).copy()

    def hand_out_states(self):
        call = getattr(L._lib, SET_NEXTN)
        call.argtypes = [ctypes.c_void_p, ctypes.c_bool, ctypes.c_bool]
        call(self.context, True, True)

    def close(self):
        L.llama_batch_ext_free(self.batch)
        L.llama_free(self.context)
        L.llama_model_free(self.model)


@L.llama_log_callback
def _quiet(level, text, data):
    return None


@pytest.fixture(scope="module")
def theirs(target, tmp_path_factory):
    L.llama_log_set(_quiet, None)
    L.llama_backend_init()
    path = tmp_path_factory.mktemp("gguf") / "target.gguf"
    write_gguf(samples.target(), path, target.vocabulary(), "f32")
    context = Context(path)
    yield context
    context.close()


def opened(draft, target, theirs, folder, packed=False):
    export_draft(draft, "gguf", folder / "draft.gguf", target, packed=packed)
    context = Context(folder / "draft.gguf", theirs)
    context.hand_out_states()
    return context


def block_logits(draft, hs, context):
    """Theirs and ours [block, V] after the states `hs` of a text."""
    L.llama_set_causal_attn(context.context, draft.config.causal)
    states = torch.cat([hs[k + 1] for k in draft.config.target_layer_ids], -1)
    for s, row in enumerate(states):
        context.add(s, state=row)
    context.run()
    block = draft.config.block_size
    for i in range(block):
        context.add(len(states) + i, token=LAST if i == 0 else samples.MASK, out=True)
    context.run()
    result = torch.stack([context.logits(i) for i in range(block)])
    context.close()
    with torch.inference_mode():
        wanted = samples.target().logits(our_block(draft, hs)[None])[0]
    return result, wanted


@pytest.mark.parametrize(
    "variant", [v for v in samples.DFLASHES if v not in ("biases", "some causal windows")]
)
def test_a_dflash_block(variant, target, theirs, tmp_path):
    draft, hs = samples.dflash(**samples.DFLASHES[variant]), samples.hidden_states(13)
    result, wanted = block_logits(draft, hs, opened(draft, target, theirs, tmp_path))
    assert (result - wanted).abs().max() < 1e-4
    assert torch.equal(result.argmax(-1), wanted.argmax(-1))


def test_a_packed_dflash_block(target, theirs, tmp_path):
    """It rounds its activations to eight bits too where a weight is Q8_0; ours stay float32."""
    draft, hs = samples.dflash(), samples.hidden_states(13)
    result, wanted = block_logits(draft, hs, opened(draft, target, theirs, tmp_path, packed=True))
    assert torch.cosine_similarity(result, wanted, dim=-1).min() > 0.995
    assert torch.equal(result.argmax(-1), wanted.argmax(-1))
    assert (result - wanted).abs().max() > 1e-3  # the blocks were read


@pytest.mark.parametrize("variant", [v for v in samples.EAGLE3S if v not in REFUSED])
def test_an_eagle3_chain(variant, target, theirs, tmp_path):
    draft, hs = samples.eagle3(**samples.EAGLE3S[variant]), samples.hidden_states(9)
    wanted = our_chain(draft, hs)
    context = opened(draft, target, theirs, tmp_path)
    for s, row in enumerate(wanted.states):
        context.add(s, state=row)
    context.run(encode=True)
    width = draft.config.hidden_size
    features = context.states(len(wanted.states), width)
    following = [*tiny.tokens(1, 9)[0].tolist()[1:], LAST]
    last = len(features) - 1
    for s, (feature, token) in enumerate(zip(features, following, strict=True)):
        if s == last:  # its graph gives out the first row of a batch, whichever row was asked for
            context.run()
        context.add(s, token=token, state=feature, out=s == last)
    context.run()
    for step, (logits, token) in enumerate(zip(wanted.logits, wanted.tokens, strict=True)):
        result = context.logits(0)
        value = logits.isfinite()
        assert (result[value] - logits[value].float()).abs().max() < 1e-4
        assert torch.equal(result.isfinite(), value) and int(result.argmax()) == token
        state = context.states(1, width)[0]
        context.add(len(features) + step, token=token, state=state, out=True)
        context.run()
    context.close()
