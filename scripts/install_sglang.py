"""Installs SGLang in ``.venv-sglang``: made to run without an NVIDIA GPU where there is none.

Run again, it does nothing, or resumes where it was interrupted. The environment is separate because
what SGLang requires excludes what other packages require.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENT = ROOT / ".venv-sglang"
PYTHON = ENVIRONMENT / "bin" / "python"
CPU = ROOT / "tests" / "support" / "sglang_cpu"

VERSION = "0.5.23"
NIXL = "1.5.1"
# These convert GGUF models.
BESIDE = ("accelerate", "gguf>=0.17")
# Storage tiers run in SGLang's own processes. Editable, so that they are those of this checkout.
OURS = ("core", "plugins/engines/kit", "plugins/storage/*", "plugins/engines/sglang")
CHECK = (
    "import sglang.version, nixl, gguf, accelerate; from sglang.srt.entrypoints import http_server;"
    "import commutator_sglang.hicache; from commutator.plugins import load_plugins; "
    "assert {'dram', 'nvme', 's3'} <= set(load_plugins().tiers.kinds); "
    f"assert sglang.version.__version__ == {VERSION!r}"
)


def main() -> int:
    has_gpu = shutil.which("nvidia-smi") is not None
    if not PYTHON.exists():
        venv.create(ENVIRONMENT, with_pip=True, clear=True)
    elif _works(has_gpu):
        print(f"SGLang {VERSION} is there: {PYTHON}")
        return 0
    if has_gpu:
        _pip(f"sglang=={VERSION}", f"nixl[cu12]=={NIXL}", *BESIDE)
        _pip(*_ours())
    else:
        _install_for_cpu()
    if not _works(has_gpu):
        sys.exit(f"SGLang was installed but cannot be imported; try: {PYTHON} -c '{CHECK}'")
    print(f"SGLang {VERSION} is installed: {PYTHON}")
    return 0


def _install_for_cpu() -> None:
    """SGLang requires CUDA packages, so pip resolves nothing: requirements.txt lists everything."""
    _pip("--no-deps", "-r", str(CPU / "requirements.txt"))
    _pip("--no-deps", f"sglang=={VERSION}", f"nixl=={NIXL}", f"nixl-cu12=={NIXL}")
    _pip("--no-deps", "--force-reinstall", str(CPU))
    _pip("--no-deps", *_ours())


def _ours() -> list[str]:
    """Arguments that install our packages."""
    paths = [path.parent for name in OURS for path in sorted(ROOT.glob(f"{name}/pyproject.toml"))]
    return [word for path in paths for word in ("-e", str(path))]


def _pip(*arguments: str) -> None:
    command = [str(PYTHON), "-m", "pip", "--disable-pip-version-check", "-q", "install", *arguments]
    if subprocess.run(command, check=False).returncode:
        sys.exit(f"cannot install {' '.join(arguments)}: see pip's message above")


def _works(has_gpu: bool) -> bool:
    check = CHECK if has_gpu else f"{CHECK}; import commutator_sglang_cpu.copies, sgl_kernel"
    environment = {} if has_gpu else {"SGLANG_USE_CPU_ENGINE": "1"}
    tried = subprocess.run([PYTHON, "-c", check], check=False, capture_output=True, env=environment)
    return tried.returncode == 0


if __name__ == "__main__":
    sys.exit(main())
