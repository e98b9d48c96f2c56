"""What the tests of both reports look at their pages with."""


def block_matplotlib(folder):
    """Return a folder that makes matplotlib look absent when it is on PYTHONPATH."""
    blocked = folder / "blocked"
    blocked.mkdir()
    (blocked / "matplotlib.py").write_text("raise ImportError('blocked')\n")
    return str(blocked)
