"""What is built for others to install: all of the package, and nothing else."""

import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import memos_hf

ROOT = Path(__file__).resolve().parent.parent
BASE = f"memos_hf-{memos_hf.__version__}"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A folder with a source archive and the wheel that is built from it, with the build tools that are installed."""
    folder = tmp_path_factory.mktemp("built")
    subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)],
        check=True,
        capture_output=True,
        timeout=120,
    )
    return folder


def test_the_wheel_has_the_package_its_types_and_license_and_nothing_else(built):
    with zipfile.ZipFile(built / f"{BASE}-py3-none-any.whl") as wheel:
        names = set(wheel.namelist())
        metadata = Parser().parsestr(wheel.read(f"{BASE}.dist-info/METADATA").decode())
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "memos_hf").rglob("*.py")}
    information = {name for name in names if name.startswith(f"{BASE}.dist-info/")}
    assert names - information == sources | {"memos_hf/py.typed"}
    assert f"{BASE}.dist-info/licenses/LICENSE" in information
    assert metadata["Version"] == memos_hf.__version__
    assert "Typing :: Typed" in metadata.get_all("Classifier")
    assert metadata.get_payload() == (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_source_archive_has_what_tests_and_readers_need(built):
    with tarfile.open(built / f"{BASE}.tar.gz") as archive:
        names = {name.removeprefix(f"{BASE}/") for name in archive.getnames()}
    assert {"README.md", "CHANGELOG.md", "LICENSE", "pyproject.toml", "memos_hf/py.typed", "tests/tiny.py"} <= names
    assert {f"examples/{path.name}" for path in (ROOT / "examples").glob("*.py")} <= names
    tops = {name.split("/")[0] for name in names}
    assert tops <= {
        *("memos_hf", "tests", "examples", "notebooks"),
        *("README.md", "CHANGELOG.md", "LICENSE", "pyproject.toml", "PKG-INFO", ".gitignore"),
    }
