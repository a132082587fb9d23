"""Export and import as a user does them: what is written loads, what would be lost is refused."""

import copy
import importlib
import json
from dataclasses import replace

import draft_samples as samples
import pytest
import tiny
import torch
from safetensors.torch import load_file

from outpace.bench.baselines import open_baseline
from outpace.bench.methods import Case, run_case
from outpace.checkpoint.shipped import EMBEDDED
from outpace.cli.main import main
from outpace.formats.export import check_fit, export_draft, import_draft
from outpace.formats.load import build_draft, describe_draft, load_dflash, read_draft, save_draft

GREEDY = Case(method="ours", temperature=0.0)
EMBEDDED_DRAFT = EMBEDDED / "dflash"


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return samples.target_files(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A folder with a DFlash that every format can say."""
    folder = tmp_path_factory.mktemp("plain") / "draft"
    export_draft(samples.dflash(torch.bfloat16), "zlab", folder)
    return folder


@pytest.fixture
def run(monkeypatch, capsys):
    """run(*arguments) -> exit code, stdout, stderr, each on lines of any length."""

    def call(*arguments):
        monkeypatch.setattr("sys.argv", ["outpace", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        given = capsys.readouterr()
        return ended.value.code, " ".join(given.out.split()), " ".join(given.err.split())

    return call


# ---- commands ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("to", ["zlab", "speculators", "transformers", "gguf"])
def test_a_draft_goes_out_and_comes_back(run, plain, target, tmp_path, to):
    out = tmp_path / "draft.gguf" if to == "gguf" else tmp_path / to
    code, output, _ = run("export", plain, "--to", to, "--out", out, "--target", target.path)
    assert code == 0 and f"written as {to} (from zlab)" in output
    code, output, _ = run("import", out, "--out", tmp_path / "back", "--target", target.path)
    assert code == 0 and f"zlab, read from {to}" in output
    samples.same(read_draft(plain)[1], read_draft(tmp_path / "back")[1])


def test_the_embedded_draft_goes_out_and_comes_back(run, tmp_path):
    code, output, _ = run("export", "dflash", "--to", "zlab", "--out", tmp_path / "d", "--target", "default")
    assert code == 0 and "written as zlab (from zlab)" in output
    samples.same(read_draft(EMBEDDED_DRAFT)[1], read_draft(tmp_path / "d")[1])


def test_the_precision_may_be_changed(run, tmp_path):
    for dtype, stored in (("bf16", torch.bfloat16), ("f32", torch.float32)):
        code, _, _ = run("export", "dflash", "--to", "zlab", "--out", tmp_path / dtype, "--dtype", dtype)
        assert code == 0
        assert {t.dtype for t in load_file(tmp_path / dtype / "model.safetensors").values()} == {stored}
        data = json.loads((tmp_path / dtype / "config.json").read_text())
        assert data["dtype"] == str(stored).removeprefix("torch.")


def test_an_eagle3_goes_out_and_comes_back(run, target, tmp_path):
    draft = samples.eagle3(torch.bfloat16)
    export_draft(draft, "sglang-eagle3", tmp_path / "e")
    for to, out in (("speculators-eagle3", "s"), ("gguf", "e.gguf")):
        more = ("--target", target.path)
        assert run("export", tmp_path / "e", "--to", to, "--out", tmp_path / out, *more)[0] == 0
        assert run("import", tmp_path / out, "--out", tmp_path / f"back-{out}")[0] == 0
        samples.same(draft, read_draft(tmp_path / f"back-{out}")[1])


def test_what_an_engine_will_misread_is_reported(run, target, tmp_path):
    export_draft(samples.dflash(**samples.WINDOWS), "zlab", tmp_path / "d")
    export = ("export", tmp_path / "d", "--to", "speculators", "--out", tmp_path / "s")
    code, _, err = run(*export, "--target", target.path)
    assert code == 2 and "--allow-lossy-format" in err and not (tmp_path / "s").exists()
    _, output, _ = run(*export, "--target", target.path, "--allow-lossy-format")
    assert "window: speculators anchors it at the block's start" in output


def test_preflight_as_a_command(run, target, tmp_path):
    export_draft(samples.dflash(rope=samples.ROPES["rounded yarn"]), "zlab", tmp_path / "d")
    code, output, _ = run("preflight", tmp_path / "d", "--target", target.path)
    assert code == 0 and "every engine takes the same" in output
    code, output, _ = run("preflight", tmp_path / "d", "--target", target.path, "--json")
    data = json.loads(output)
    assert code == 0 and data["clean"] and data["kind"] == "DFlash"
    rows = {row["check"]: row for row in data["rows"]}
    assert rows["layer ids"]["cells"]["vLLM"] == {"state": "same", "message": "hs 1, 3, 5"}
    assert rows["layer ids"]["message"] == "hs 1, 3, 5"


def test_preflight_of_the_embedded_pair_exits_1_for_llama_cpps_own_converter(run):
    code, output, _ = run("preflight", "dflash")
    assert code == 1 and "convert with `outpace export --to gguf`" in output
    code, output, _ = run("preflight", "dflash", "--engine", "SGLang", "--engine", "vLLM")
    assert code == 0


ERRORS = [
    (("export", "no/such", "--to", "zlab", "--out", "OUT"), "no/such is not there"),
    (("export", "dflash", "--to", "onnx", "--out", "OUT"), "--to onnx: the formats are zlab, speculators"),
    (("export", "dflash", "--to", "sglang-eagle3", "--out", "OUT"), "this is a DFlash: choose zlab or"),
    (("export", "PLAIN", "--to", "speculators", "--out", "OUT"), "give --target"),
    (("export", "PLAIN", "--to", "gguf", "--out", "OUT.gguf"), "give --target"),
    (("export", "dflash", "--to", "zlab", "--out", "OUT", "--dtype", "q4"), "--dtype q4: choose"),
    (("export", "dflash", "--to", "zlab", "--out", "OUT", "--target", "TARGET"), "is for a target with"),
    (("export", "dflash", "--to", "zlab", "--out", EMBEDDED_DRAFT), "is the draft itself"),
    (("export", "dflash", "--to", "zlab", "--out", "TARGET"), "holds something that is no draft"),
    (("import", "no/such", "--out", "OUT"), "no/such is not there"),
    (("import", "TARGET", "--out", "OUT"), "is no draft that is known here"),
    (("import", EMBEDDED_DRAFT, "--out", EMBEDDED_DRAFT), "is the draft itself"),
    (("preflight", "TARGET"), "is no draft that is known here"),
    (("preflight", "dflash", "--engine", "TGI"), "unknown engine TGI; known: outpace, SGLang"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "message"), ERRORS)
def test_errors_are_one_sentence_and_leave_nothing(run, plain, target, tmp_path, arguments, message):
    places = {
        "PLAIN": plain,
        "TARGET": target.path,
        "OUT": tmp_path / "out",
        "OUT.gguf": tmp_path / "out.gguf",
    }
    code, out, err = run(*(places.get(str(a), a) for a in arguments))
    assert code == 2 and out == "" and message in err
    assert list(tmp_path.iterdir()) == []


# ---- doors -----------------------------------------------------------------------------------------------


def test_a_folder_is_replaced_whole_only_where_it_holds_a_draft(target, tmp_path):
    draft, other = samples.dflash(), samples.dflash(num_layers=2)
    export_draft(draft, "zlab", tmp_path / "d")
    export_draft(other, "zlab", tmp_path / "d")
    samples.same(other, read_draft(tmp_path / "d")[1])
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "plan.txt").write_text("mine")
    for out in (tmp_path / "notes", tmp_path / "notes" / "plan.txt"):
        with pytest.raises(ValueError, match=r"choose another folder|is a file;"):
            export_draft(draft, "zlab", out)
    with pytest.raises(ValueError, match=r"GGUF is one file: name it draft\.gguf"):
        export_draft(draft, "gguf", tmp_path / "d", target)
    samples.same(other, read_draft(tmp_path / "d")[1])


def test_an_export_that_fails_leaves_the_old_file(target, tmp_path):
    path = tmp_path / "d.gguf"
    export_draft(samples.dflash(), "gguf", path, target)
    before = path.read_bytes()
    odd = replace(
        samples.dflash(), tensors=samples.dflash().tensors | {"fc.weight": torch.ones(96, 288).double()}
    )
    with pytest.raises(ValueError, match=r"fc.weight is torch.float64: GGUF has no such type"):
        export_draft(odd, "gguf", path, target)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("draft", "message"),
    [
        (samples.dflash(vocab_size=291), "vocab_size 291; .* has 290"),
        (samples.dflash(hidden_size=88), "hidden_size 88; .* has 96"),
        (samples.dflash(num_target_layers=7), "num_hidden_layers 7; .* has 6"),
        (samples.eagle3(layer_ids=(1, 2, 6)), "num_hidden_layers 7; .* has 6"),
    ],
)  # fmt: skip
def test_a_draft_of_another_target_is_not_exported(target, draft, message):
    with pytest.raises(ValueError, match=message):
        check_fit(draft, target)
    check_fit(draft, None)


def test_import_names_what_it_detected(target, tmp_path):
    export_draft(samples.eagle3(), "speculators-eagle3", tmp_path / "s", target)
    result, written, notes = import_draft(tmp_path / "s", tmp_path / "e", target)
    assert (result, written, notes) == ("speculators-eagle3", "sglang-eagle3", [])


def test_a_draft_of_any_format_runs(target, tmp_path):
    """What decodes is built from any format, to the same bits."""
    draft = samples.dflash(rope=samples.ROPES["rounded yarn"])
    state = build_draft(draft).state_dict()
    for to in ("speculators", "transformers", "gguf"):
        out = tmp_path / ("d.gguf" if to == "gguf" else to)
        export_draft(draft, to, out, target)
        loaded = load_dflash(out)
        assert loaded.config == draft.config
        assert all(torch.equal(t, state[name]) for name, t in loaded.state_dict().items())


def test_what_training_saves_is_what_export_writes(tmp_path):
    draft = samples.dflash()
    save_draft(build_draft(draft), tmp_path / "saved", torch.float32)
    export_draft(describe_draft(build_draft(draft)), "zlab", tmp_path / "exported")
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "saved" / name).read_bytes() == (tmp_path / "exported" / name).read_bytes()


# ---- transformers runs what we write ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def fond():
    """A target fond of token 7, as its MASK is, so that a draft is right now and then; and the baseline."""
    reason = "transformers has DFlash from 5.23 on"
    pytest.importorskip("transformers.models.muse_glimmer_assistant", reason=reason)
    target = copy.deepcopy(samples.target())
    with torch.no_grad():
        target.lm_head.weight[7] *= 4
        target.embed_tokens.weight[samples.MASK] = target.lm_head.weight[7]
    return target, open_baseline(target, None, (1,))


@pytest.mark.parametrize("variant", ["yarn", "llama3", "linear", "window", "some windows"])
def test_transformers_own_class_accepts_what_ours_accepts(variant, fond, tmp_path):
    """From the folder, with nothing missing, nothing left over and nothing stated next to it."""
    target, baseline = fond
    draft = samples.dflash(**samples.DFLASHES[variant])
    leaning = {n: t * 0.1 if "down_proj" in n else t for n, t in draft.tensors.items()}
    draft = replace(draft, tensors=leaning)
    export_draft(draft, "transformers", tmp_path / "d")
    theirs = importlib.import_module("transformers").MuseGlimmerAssistantModel
    model, note = theirs.from_pretrained(tmp_path / "d", dtype=torch.float32, output_loading_info=True)
    assert not any(note[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    chosen = {("transformers-dflash", 1): baseline.chosen["transformers", 1]}
    runs = replace(baseline, draft=model.eval(), chosen=chosen).methods()
    prompts = tiny.tokens(1, 13, seed=2).tolist()
    result = runs["transformers-dflash"](prompts, 41, 0)
    ours = run_case(GREEDY, target, build_draft(draft).bind(target))(prompts, 41, 0)
    assert result.tokens == ours.tokens
    lens = result.trace.accept_lens
    assert len(lens) > 8 and len(set(lens)) > 1
    assert ours.trace.accept_lens[: result.trace.rounds] == lens
