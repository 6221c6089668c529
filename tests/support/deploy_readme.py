"""deploy/README.md: its blocks, and the certificates and token that its commands make."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
README = (DEPLOY / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def make_secrets(folder: Path) -> None:
    """ca.crt, tls.crt, tls.key and token, as its step 2 says; every user may read them."""
    (commands,) = [block for block in blocks("bash") if block.startswith("openssl")]
    subprocess.run(["bash", "-ec", commands], cwd=folder, check=True, capture_output=True)
    for path in folder.iterdir():
        path.chmod(0o644)
