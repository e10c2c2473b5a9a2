"""Fixture of the contract's tests."""
import shutil

import pytest
from good import write_good_files


@pytest.fixture(scope="session")
def good_files(tmp_path_factory):
    here = tmp_path_factory.mktemp("good")
    write_good_files(here)
    return here


@pytest.fixture
def here(good_files, tmp_path):
    """Return a new folder with the good files."""
    return shutil.copytree(good_files, tmp_path / "here")
