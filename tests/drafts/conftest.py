"""The tiny target's files, and drafts where the files were edited after they were written."""

from functools import partial

import draft_samples as samples
import pytest


@pytest.fixture(scope="session")
def target(tmp_path_factory):
    return samples.target_files(tmp_path_factory.mktemp("target"))


@pytest.fixture
def edited(target, tmp_path):
    """edited(draft, format, edit) -> the folder after `edit(config, tensors)`."""
    return partial(samples.edited, tmp_path, target)
