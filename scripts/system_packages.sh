#!/bin/sh
# Installs by apt what the build needs and the machine lacks; does nothing if all is there.
# usage: system_packages.sh PYTHON
set -eu
python=$1

missing=
need() {
    missing="$missing $1"
}

command -v "$python" >/dev/null || need python3
command -v cc >/dev/null || need gcc
command -v c++ >/dev/null || need g++
if [ -n "${DEVICEMESH_GLOO_ROOT:-}" ]; then
    : # the build says so itself if gloo is not there
elif [ ! -e /usr/include/gloo/config.h ] && [ ! -e /usr/local/include/gloo/config.h ]; then
    need libgloo-dev
fi
"$python" -c 'import ensurepip, venv' 2>/dev/null || need python3-venv
"$python" -c 'import os, sysconfig
os.stat(os.path.join(sysconfig.get_path("include"), "Python.h"))' 2>/dev/null || need python3-dev

[ -n "$missing" ] || exit 0
if ! command -v apt-get >/dev/null; then
    echo "missing:$missing (the names are Debian's); install them and try again" >&2
    exit 1
fi
as_root=
[ "$(id -u)" = 0 ] || as_root=sudo
echo "installing$missing"
export DEBIAN_FRONTEND=noninteractive
$as_root apt-get update -q
# shellcheck disable=SC2086  # a list of names
$as_root apt-get install -q -y --no-install-recommends $missing
