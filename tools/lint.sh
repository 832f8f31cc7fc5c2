#!/usr/bin/env bash
# Every style and type check, all of them even when one fails; exit 1 when any did.
set -uo pipefail
cd "$(dirname "$0")/.."

failed=0
check() {
  printf '== %s\n' "$*"
  "$@" || failed=1
}

mapfile -t cuda < <(find kernels_cu tests/emulator -name '*.cu' -o -name '*.cuh' -o -name '*.hpp' | sort)
check ruff check .
check ruff format --check .
check mypy --strict rawattn
check clang-format --dry-run -Werror "${cuda[@]}"
exit "$failed"
