"""GGUF files: the same model as its safetensors in every format, mapped; what is wrong is refused by name."""

import dataclasses
import struct

import gguf
import numpy as np
import pytest
import tiny
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from outpace.checkpoint.open import LoadError, open_checkpoint
from outpace.formats.convert import write_gguf
from outpace.models.load import build, load_target, named_tensors, weight_of
from outpace.models.save import save_target
from outpace.ops.quant import Joined, Quant

WIDE = {"hidden_size": 256, "num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "intermediate_size": 512}


def model(family, **changes):
    """As GGUF can say it: windows only where gpt-oss has them, experts in every layer."""
    config = tiny.config(family, window=family == "gpt_oss", **changes)
    if family == "qwen3_moe":
        config = dataclasses.replace(config, moe_layers=(True,) * config.num_layers)
    made = build(config)
    tiny.randomise(named_tensors(made))
    return made.eval()


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gguf")
    for family in tiny.FAMILIES:
        write_gguf(model(family), folder / f"{family}.gguf", type="f32")
    return folder


@torch.inference_mode()
def logits(target, tokens):
    return target.logits(target(tokens).hidden)


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("length", [5, 40])  # through the row kernels and past them
def test_float32_says_the_same(files, family, length):
    tokens = tiny.tokens(2, length)
    assert (
        logits(load_target(files / f"{family}.gguf"), tokens) - logits(model(family), tokens)
    ).abs().max() < 1e-4


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("type", ["f16", "bf16", "q8_0"])
def test_other_types_are_the_rounded_weights(family, type, tmp_path):
    """The oracle: a dense model where the matrices went through gguf's own rounding."""
    made = model(family)
    write_gguf(made, tmp_path / "it.gguf", type=type)
    ours = load_target(tmp_path / "it.gguf")
    kind = GGMLQuantizationType[type.upper()]
    with torch.no_grad():
        for name, p in made.named_parameters():
            if p.dim() < 2 or name.endswith("bias") or ".router." in name:
                continue
            this = kind if p.shape[-1] % GGML_QUANT_SIZES[kind][0] == 0 else GGMLQuantizationType.F16
            packed = gguf.quants.quantize(p.numpy(), this)
            p.copy_(torch.from_numpy(gguf.quants.dequantize(packed, this)).view_as(p))
    for tokens in (tiny.tokens(1, 7), tiny.tokens(3, 40)):
        assert (logits(ours, tokens) - logits(made, tokens)).abs().max() < 1e-4


def test_mxfp4_experts_stay_packed_and_come_back_bit_for_bit(tmp_path):
    save_target(model("gpt_oss"), tmp_path / "hf", pack=True)
    theirs = load_target(tmp_path / "hf")
    write_gguf(theirs, tmp_path / "it.gguf", type="f32")
    ours = load_target(tmp_path / "it.gguf")
    experts = ours.layers[1].mlp
    assert experts.gate.weight.format == experts.up.weight.format == experts.down.weight.format == "MXFP4"
    for tokens in (tiny.tokens(1, 7), tiny.tokens(3, 40)):
        assert (logits(ours, tokens) - logits(theirs, tokens)).abs().max() < 1e-4
    save_target(ours, tmp_path / "again")
    again = load_target(tmp_path / "again")
    for (name, a), (_, b) in zip(named_tensors(theirs), named_tensors(again), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_moe"])
def test_dense_experts_come_back(family, files, tmp_path):
    save_target(load_target(files / f"{family}.gguf"), tmp_path)
    wanted = dict(named_tensors(model(family)))
    for name, tensor in named_tensors(load_target(tmp_path)):
        assert torch.equal(tensor, wanted[name]), name


def random_blocks(format, rows, columns, seed=0):
    """Valid blocks of moderate size: random codes under scales of about 0.01."""
    rng = np.random.default_rng(seed)
    values, size = GGML_QUANT_SIZES[GGMLQuantizationType[format]]
    blocks = rng.integers(0, 256, (rows, columns // values, size), dtype=np.uint8)
    halves = rng.uniform(0.002, 0.01, (rows, columns // values, 2)).astype(np.float16)
    if format == "Q6_K":
        blocks[..., -2:] = halves[..., :1].view(np.uint8)
    elif format == "MXFP4":
        blocks[..., 0] = rng.integers(118, 124, blocks.shape[:-1])
    else:
        count = 4 if format in ("Q4_K", "Q5_K") else 2
        blocks[..., :count] = np.ascontiguousarray(halves[..., : count // 2]).view(np.uint8)
    return blocks.reshape(rows, -1)


def rewrite(source, target, change):
    """A copy of a GGUF file where the tensors went through change(name, array, type) -> (array, type) or
    None."""
    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(target, architecture)
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            of = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(key, field.contents(), field.types[0], of)
    for tensor in reader.tensors:
        changed = change(tensor.name, np.array(tensor.data), tensor.tensor_type)
        if changed is not None:
            array, kind = changed
            writer.add_tensor(tensor.name, array, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("format", ["Q4_0", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "MXFP4", "Q5_0"])
def test_every_format_is_what_gguf_says_it_is(format, tmp_path):
    """All matrices of a Qwen3 in blocks, the embedding and tied head too; q, k and v in different ones."""
    config = dataclasses.replace(tiny.config("qwen3", window=False), **WIDE)
    made = build(config)
    tiny.randomise(named_tensors(made))
    write_gguf(made, tmp_path / "plain.gguf", type="f32")
    kind = GGMLQuantizationType[format]
    seen = iter(range(1000))

    def block(name, array, was):
        if array.ndim < 2 or name.endswith("attn_k.weight"):
            return array, was
        this = GGMLQuantizationType.Q8_0 if name.endswith("attn_v.weight") else kind
        return random_blocks(this.name, *array.shape, seed=next(seen)), this

    def dense(name, array, was):
        blocks, this = block(name, array, was)
        return (
            (gguf.quants.dequantize(blocks, this), GGMLQuantizationType.F32) if this != was else (array, was)
        )

    rewrite(tmp_path / "plain.gguf", tmp_path / "packed.gguf", block)
    seen = iter(range(1000))
    rewrite(tmp_path / "plain.gguf", tmp_path / "dense.gguf", dense)
    packed, plain = (load_target(tmp_path / f"{name}.gguf") for name in ("packed", "dense"))
    if format != "Q5_0":  # has no product: it is unpacked at loading
        assert isinstance(packed.embed_tokens.weight, Quant) and packed.embed_tokens.weight.format == format
        assert isinstance(packed.layers[0].self_attn.qkv_proj.weight, Joined)
    for tokens in (tiny.tokens(1, 6), tiny.tokens(2, 50)):
        a, b = logits(packed, tokens), logits(plain, tokens)
        assert (a - b).abs().max() < 1e-4 * b.abs().max()


def test_rows_do_not_depend_on_their_company(tmp_path):
    write_gguf(model("gpt_oss"), tmp_path / "it.gguf", type="q8_0")
    target = load_target(tmp_path / "it.gguf")
    tokens = tiny.tokens(1, 24)
    with torch.inference_mode():
        together, alone = (target.make_cache(1, 32, slack=20) for _ in range(2))
        many = target.logits(target(tokens[:, :20], together).hidden)
        one = [target.logits(target(tokens[:, i : i + 1], alone).hidden) for i in range(20)]
    assert torch.equal(many, torch.cat(one, dim=1))


def test_metadata_is_the_config(files):
    for family in tiny.FAMILIES:
        ours, theirs = open_checkpoint(files / f"{family}.gguf").config, model(family).config
        loaded = load_target(files / f"{family}.gguf").config
        assert ours["vocab_size"] == theirs.vocab_size
        skip = {"rope", "eos_token_ids", "bos_token_id", "pad_token_id", "swiglu_limit", "moe_layers"}
        for field in dataclasses.fields(theirs):
            if field.name not in skip:
                assert getattr(loaded, field.name) == getattr(theirs, field.name), (family, field.name)
    assert load_target(files / "gpt_oss.gguf").config.rope.truncate is False


def test_yarn_is_not_truncated_for_gpt_oss_and_is_for_others(files, tmp_path):
    """What a file without our own key means: gpt-oss's config specifies no truncation, HF's default is to."""
    strip(files / "gpt_oss.gguf", tmp_path / "it.gguf", "gpt-oss.rope.scaling.truncate")
    assert load_target(tmp_path / "it.gguf").config.rope.truncate is False
    yarn = dataclasses.replace(tiny.config("gpt_oss").rope, truncate=True)
    write_gguf(model("qwen3", rope=yarn), tmp_path / "q.gguf")
    strip(tmp_path / "q.gguf", tmp_path / "r.gguf", "qwen3.rope.scaling.truncate")
    assert load_target(tmp_path / "r.gguf").config.rope.truncate is True


def strip(source, target, key):
    """The same length: the key gets a name that nobody reads."""
    data = source.read_bytes()
    assert data.count(key.encode()) == 1
    target.write_bytes(data.replace(key.encode(), key[:-1].encode() + b"_"))


def test_views_outlive_a_replaced_file(files, tmp_path):
    path = tmp_path / "it.gguf"
    path.write_bytes((files / "llama.gguf").read_bytes())
    target = load_target(path)
    before = logits(target, tiny.tokens(1, 9))
    other = tmp_path / "other"
    other.write_bytes(b"\0" * path.stat().st_size)
    other.replace(path)
    assert torch.equal(logits(target, tiny.tokens(1, 9)), before)


def test_split_files_are_opened_together(files, tmp_path):
    reader = gguf.GGUFReader(files / "qwen3.gguf")
    total = len(reader.tensors)
    for part in (0, 1):
        writer = gguf.GGUFWriter(tmp_path / f"m-{part + 1:05}-of-00002.gguf", "qwen3")
        for key, field in reader.fields.items():
            if not part and not key.startswith("GGUF.") and key != "general.architecture":
                writer.add_key_value(key, field.contents(), field.types[0])
        writer.add_key_value("split.count", 2, gguf.GGUFValueType.UINT16)
        for tensor in reader.tensors[part * total // 2 : (part + 1) * total // 2]:
            writer.add_tensor(tensor.name, np.array(tensor.data))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    whole = load_target(files / "qwen3.gguf")
    first, second = (tmp_path / f"m-0000{i}-of-00002.gguf" for i in (1, 2))
    assert torch.equal(logits(load_target(first), tiny.tokens(1, 9)), logits(whole, tiny.tokens(1, 9)))
    with pytest.raises(LoadError, match="part 2 of 2: name the first one"):
        load_target(second)
    second.rename(tmp_path / "elsewhere.gguf")
    with pytest.raises(LoadError, match=r"missing next to it: m-00002-of-00002\.gguf"):
        load_target(first)


def test_the_first_layers_alone(files):
    two = load_target(files / "gpt_oss.gguf", layers=2)
    assert len(two.layers) == two.config.num_layers == 2
    with torch.inference_mode():
        whole = model("gpt_oss")(tiny.tokens(1, 9), aux=[1]).aux[0]
        assert (two(tiny.tokens(1, 9), aux=[1]).aux[0] - whole).abs().max() < 1e-5
    with pytest.raises(ValueError, match="layers 5: give 1 to 4"):
        load_target(files / "gpt_oss.gguf", layers=5)


# ---- refusals ---------------------------------------------------------------------------------


def test_a_tensor_too_few_and_one_too_many(files, tmp_path):
    rewrite(
        files / "llama.gguf",
        tmp_path / "it.gguf",
        lambda n, a, t: None if n == "blk.1.ffn_up.weight" else (a, t),
    )
    with pytest.raises(LoadError, match=r"missing in the checkpoint: model\.layers\.1\.mlp\.up_proj\.weight"):
        load_target(tmp_path / "it.gguf")
    data = (files / "llama.gguf").read_bytes().replace(b"blk.1.ffn_up.weight", b"blk.1.ffn_op.weight")
    (tmp_path / "it.gguf").write_bytes(data)
    with pytest.raises(LoadError, match=r"left over in the checkpoint: blk\.1\.ffn_op\.weight"):
        load_target(tmp_path / "it.gguf")


def test_a_wrong_shape(files, tmp_path):
    cut = {"output_norm.weight": lambda a: a[:-1]}
    rewrite(files / "llama.gguf", tmp_path / "it.gguf", lambda n, a, t: (cut.get(n, lambda a: a)(a), t))
    with pytest.raises(LoadError, match=r"model\.norm\.weight: shape \(41,\), the config wants \(42,\)"):
        load_target(tmp_path / "it.gguf")


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("llama.embedding_length", "lacks 'llama.embedding_length'"),
        ("llama.block_count", "lacks 'llama.block_count'"),
        ("general.architecture", "general.architecture is 'None'"),
    ],
)
def test_missing_metadata(files, tmp_path, key, message):
    strip(files / "llama.gguf", tmp_path / "it.gguf", key)
    with pytest.raises(LoadError, match=message):
        load_target(tmp_path / "it.gguf")


def test_another_architecture(files, tmp_path):
    data = (files / "llama.gguf").read_bytes()
    (tmp_path / "it.gguf").write_bytes(
        data.replace(struct.pack("<Q", 5) + b"llama", struct.pack("<Q", 5) + b"mamba")
    )
    with pytest.raises(LoadError, match=r"general\.architecture is 'mamba'; read are gpt-oss, qwen3"):
        load_target(tmp_path / "it.gguf")


def test_what_gguf_cannot_say(tmp_path):
    windowed = tiny.target("qwen3")
    with pytest.raises(ValueError, match="sliding window"):
        write_gguf(windowed, tmp_path / "it.gguf")
    with pytest.raises(ValueError, match="experts in every layer"):
        write_gguf(tiny.target("qwen3_moe", window=False), tmp_path / "it.gguf")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_written_names_are_read_names(files, family):
    """No tensor of ours is lost on the way: every parameter of the model is assigned."""
    target = load_target(files / f"{family}.gguf")
    for name, _ in named_tensors(model(family)):
        path, _, leaf = name.rpartition(".")
        if leaf == "weight" and path.endswith("mlp.up"):
            assert weight_of(target, f"{path.removesuffix('up')}gate.weight").shape
        assert not any(t.is_meta for _, t in named_tensors(target)), name


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_rope_over_a_part_of_a_head_is_refused(family, files, tmp_path):
    data = bytearray((files / f"{family}.gguf").read_bytes())
    key = f"{family}.rope.dimension_count".encode()
    at = data.index(key) + len(key)
    assert struct.unpack_from("<II", data, at) == (4, load_target(files / f"{family}.gguf").config.head_dim)
    struct.pack_into("<I", data, at + 4, 4)
    (tmp_path / "it.gguf").write_bytes(data)
    with pytest.raises(LoadError, match=r"rope\.dimension_count' is 4, and a head has"):
        load_target(tmp_path / "it.gguf")
