#!/usr/bin/env bash
# Creates .venv in the repository's root with everything the project needs; a second run takes no time.
# Needs Python 3.11+ with venv; everything comes as wheels.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$PWD
venv=$root/.venv
stamp=$venv/.made-from
export PIP_DISABLE_PIP_VERSION_CHECK=1

say() { printf 'venv: %s\n' "$*" >&2; }
die() { say "$*"; exit 1; }
pip() { "$venv/bin/python" -m pip --no-input "$@"; }

find_python() {
  local candidate
  for candidate in ${PYTHON:-} python3 python3.13 python3.12 python3.11; do
    if command -v "$candidate" >/dev/null &&
      "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      command -v "$candidate"
      return
    fi
  done
  die "needs Python 3.11 or newer; found $(python3 --version 2>&1 || true). Set PYTHON=/path/to/python3.11"
}

# What .venv was made from; also its place, as the scripts in it hold absolute paths.
fingerprint() {
  { echo "$root"; cat requirements.lock pyproject.toml deploy/make_venv.sh; } | sha256sum | cut -d' ' -f1
}

make_venv() {
  local python
  python=$(find_python)
  # The scripts of a folder that was moved or copied here still start the old place's Python.
  if ! grep -q "^#!$venv/" "$venv/bin/pip" 2>/dev/null || ! pip --version >/dev/null 2>&1; then
    say "creating .venv with $("$python" --version)"
    rm -rf "$venv"
    "$python" -m venv "$venv" ||
      die "python -m venv failed; on Debian and Ubuntu: apt-get install python3-venv"
  fi
  # It shares its files with Pillow: where it is, pip would take Pillow's for installed.
  if pip show --quiet pillow-simd 2>/dev/null; then pip uninstall --quiet -y pillow-simd pillow; fi
  say "installing requirements.lock (about 2 minutes the first time)"
  # The trainers' libraries, where install_trainers.sh has been, want other versions: no conflict to tell.
  pip install --quiet --no-warn-conflicts -r requirements.lock
  pip install --quiet --no-deps --editable .
}

print=$(fingerprint)
if [ "$(cat "$stamp" 2>/dev/null)" != "$print" ]; then
  rm -f "$stamp"
  make_venv
fi
echo "$print" >"$stamp"
