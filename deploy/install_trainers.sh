#!/usr/bin/env bash
# Installs into .venv the trainers' libraries that the adapters are tested with (deploy/trainers.lock);
# a second run takes no time.
#
# Without their dependencies: torchtitan asks for an older fsspec than the service is tested with, and
# everything they need besides stands in the lock. Where it cannot install, offline for example, it
# says so and ends well: the adapters' tests then skip, and say why.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=$PWD/.venv
stamp=$venv/.trainers-made-from
export PIP_DISABLE_PIP_VERSION_CHECK=1
export DS_BUILD_OPS=0 # DeepSpeed compiles nothing ahead

say() { printf 'trainers: %s\n' "$*" >&2; }

fingerprint() {
  { cat "$venv/.made-from" 2>/dev/null; cat deploy/trainers.lock; } | sha256sum | cut -d' ' -f1
}

print=$(fingerprint)
if [ "$(cat "$stamp" 2>/dev/null)" = "$print" ]; then
  exit 0
fi
rm -f "$stamp"
say "installing deploy/trainers.lock (about 2 minutes the first time)"
if "$venv/bin/python" -m pip --no-input install --quiet --no-deps -r deploy/trainers.lock; then
  echo "$print" >"$stamp"
else
  say "pip could not install them; the adapters' tests will skip those that are missing"
fi
