#!/usr/bin/env bash
# Creates .venv in the repository's root with everything the project needs; a second run takes no time.
#
# Needs Python 3.11+ with venv. Pictures are decoded by pillow-simd, built here from source on x86-64
# Linux (C compiler and headers of Python, zlib, libjpeg, libwebp; installed with apt-get when run as
# root), by stock Pillow elsewhere or when that build is not possible. Never by both: they share the
# package name PIL, and pip would put one over the other without a word.
set -euo pipefail

PILLOW_SIMD=pillow-simd==12.1.1.post0
PILLOW=pillow==12.1.1

cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$PWD
venv=$root/.venv
stamp=$venv/.made-from
fallback=$venv/.stock-pillow-because
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
  say "installing requirements.lock (about 2 minutes the first time)"
  pip install --quiet -r requirements.lock
  pip install --quiet --no-deps --editable .
}

# One word for each thing the pillow-simd build lacks.
missing_for_simd() {
  command -v cc >/dev/null || command -v gcc >/dev/null || { echo compiler; return; }
  local include header
  include=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("include"))')
  [ -e "$include/Python.h" ] || echo Python.h
  for header in zlib.h jpeglib.h webp/decode.h; do
    printf '#include <stdio.h>\n#include <%s>\n' "$header" |
      "$(command -v cc || command -v gcc)" -E -x c - >/dev/null 2>&1 || echo "$header"
  done
}

debian_packages() {
  local thing
  for thing in "$@"; do
    case $thing in
      compiler) echo gcc libc6-dev python3-dev zlib1g-dev libjpeg-dev libwebp-dev ;;
      Python.h) echo python3-dev ;;
      zlib.h) echo zlib1g-dev ;;
      jpeglib.h) echo libjpeg-dev ;;
      webp/decode.h) echo libwebp-dev ;;
    esac
  done
}

apt_install() {
  local install=(env DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "$@")
  say "installing system packages: $*"
  "${install[@]}" >/dev/null 2>&1 || { apt-get update -q >/dev/null && "${install[@]}" >/dev/null; }
}

has_pillow() { # stock or simd: exactly that one is installed, and it reads JPEG and WebP
  "$venv/bin/python" - "$1" <<'PY' 2>/dev/null
import sys
from importlib.metadata import distributions

import PIL
from PIL import features

names = {d.metadata["Name"].lower().replace("_", "-") for d in distributions()}
wanted = {"simd": "pillow-simd", "stock": "pillow"}[sys.argv[1]]
assert names & {"pillow", "pillow-simd"} == {wanted}
assert ("post" in PIL.__version__) == (wanted == "pillow-simd")
assert features.check("jpg") and features.check("webp")
PY
}

build_simd() {
  local cc=${CC:-$(command -v cc || command -v gcc)}
  if grep -qw avx2 /proc/cpuinfo; then cc="$cc -mavx2"; fi
  say "building $PILLOW_SIMD with '$cc' (about a minute)"
  pip uninstall --quiet -y pillow pillow-simd 2>/dev/null || true
  # No cache: pip would take a wheel that was built before the headers came, without WebP.
  CC=$cc pip install --quiet --no-cache-dir --no-binary pillow-simd "$PILLOW_SIMD" && has_pillow simd
}

install_stock() {
  has_pillow stock && return
  pip uninstall --quiet -y pillow pillow-simd 2>/dev/null || true
  pip install --quiet "$PILLOW"
  has_pillow stock || die "$PILLOW is installed, yet does not import, or reads no JPEG or WebP"
}

install_pillow() {
  has_pillow simd && return
  if [ "$(uname -sm)" != "Linux x86_64" ]; then
    install_stock
    return
  fi
  local missing why
  mapfile -t missing < <(missing_for_simd)
  if [ ${#missing[@]} -gt 0 ] && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    # shellcheck disable=SC2046
    apt_install $(debian_packages "${missing[@]}") || say "apt-get failed"
    mapfile -t missing < <(missing_for_simd)
  fi
  why=${missing[*]:-build failed}
  if has_pillow stock && [ "$(cat "$fallback" 2>/dev/null)" = "$why" ]; then
    say "stock Pillow, not pillow-simd: $why"
    return
  fi
  if [ ${#missing[@]} -eq 0 ] && build_simd; then
    rm -f "$fallback"
    return
  fi
  if [ ${#missing[@]} -gt 0 ]; then
    say "pillow-simd cannot be built; missing: ${missing[*]}"
    # shellcheck disable=SC2046
    say "on Debian and Ubuntu: apt-get install" $(debian_packages "${missing[@]}")", then make venv again"
  else
    say "pillow-simd did not build (see above); 'make clean venv' tries again"
  fi
  say "falling back to stock Pillow: the same service, resizes several times slower"
  install_stock
  echo "$why" >"$fallback"
}

print=$(fingerprint)
if [ "$(cat "$stamp" 2>/dev/null)" != "$print" ]; then
  rm -f "$stamp"
  make_venv
fi
install_pillow
echo "$print" >"$stamp"
