"""Files of released engines, out of their wheels."""

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from eagle3.common import files
from eagle3.engines import lookup, patch_files


def released(engine, version):
    """Return a folder with the released files that the patches touch, out of the wheel on the package index.

    Only these files are kept, in the user's cache, so that the wheels (up to 57 MB) are fetched once.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "eagle3-tests"
    known = patch_files.known_hashes(engine)[version]
    folder = cache / f"{engine}-{version}"
    if not all((folder / path).is_file() and files.sha256_file(folder / path) == known[path]["original"]
               for path in known):
        name = lookup.DISTRIBUTIONS[engine][-1]
        with tempfile.TemporaryDirectory() as download:
            command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "-d", download]
            fetched = subprocess.run([*command, f"{name}=={version}"], capture_output=True, text=True)
            assert fetched.returncode == 0, f"no wheel to test against: {fetched.stderr[-1000:]}"
            with zipfile.ZipFile(next(Path(download).glob("*.whl"))) as wheel:
                for path in known:
                    files.write_bytes(folder / path, wheel.read(path))
    return folder
