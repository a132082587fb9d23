"""What every test shares: quiet threads, a fixed seed, and the tiny HF twins, saved once a session."""

import os

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
from hypothesis import HealthCheck, settings

from outpace.kernels import bindings

settings.register_profile(
    "outpace", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("outpace")


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _shared_targets_stay():
    """A target of `tiny.target` that a test changed would make a later one fail, or test less."""
    import tiny

    yield
    names = tiny.changed()
    assert not names, f"this test leaves {', '.join(names)} of a shared target changed"


@pytest.fixture(scope="session", autouse=True)
def _own_cache_folder(tmp_path_factory):
    """Nothing measured or checked by an earlier run is found, and nothing is left."""
    from outpace import config
    from outpace.text import tokenizer

    folder, original = tmp_path_factory.mktemp("cache"), config.cache_folder
    config.cache_folder = tokenizer.cache_folder = lambda: folder
    yield
    config.cache_folder = tokenizer.cache_folder = original


@pytest.fixture(scope="session")
def twins(tmp_path_factory):
    """family -> (folder, transformers model): what `transformers` saved, made when first asked for."""
    import tiny

    made = {}

    def twin(family):
        if family not in made:
            folder = tmp_path_factory.mktemp(family)
            made[family] = (folder, tiny.save_twin(family, folder))
        return made[family]

    return twin


@pytest.fixture
def force_kernels(monkeypatch):
    """force_kernels(False): the plain references run; True: the C kernels, or the test is skipped."""

    def force(on):
        if on and not bindings.available():
            pytest.skip(f"no CPU kernels: {bindings.why_not()}")
        monkeypatch.setattr(bindings, "available", lambda: on)

    return force


@pytest.fixture
def few_repeats(monkeypatch):
    """A calibration of moments, which any request may make for itself: its figures mean nothing."""
    _calibrate_in_moments(monkeypatch)
    monkeypatch.setattr("outpace.decode.auto.QUICK", 1e9)


@pytest.fixture(scope="module")
def few_repeats_in_module():
    """few_repeats for the fixtures of a module."""
    with pytest.MonkeyPatch.context() as patch:
        _calibrate_in_moments(patch)
        yield


def _calibrate_in_moments(patch):
    for name, value in (("MIN_REPEATS", 2), ("MAX_REPEATS", 2), ("STEADY", 8), ("ATTEMPTS", 1)):
        patch.setattr(f"outpace.decode.calibrate.{name}", value)
