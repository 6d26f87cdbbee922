#!/bin/sh
# Builds Debian's libjpeg-turbo with the sanitizers of memory and undefined behaviour: FOLDER/libjpeg.so.62.
# Releases of Debian up to trixie have 2.1, which is too old, so the source is that of unstable; apt's own lists stay as
# they are. Needs apt, dpkg-dev, cmake and make.
set -eu
mkdir -p "$1/lists/partial"
cd "$1"
key=/usr/share/keyrings/debian-archive-keyring.gpg
echo "deb-src [signed-by=$key] http://deb.debian.org/debian unstable main" > unstable.list
apt="apt-get -o Dir::Etc::SourceList=$PWD/unstable.list -o Dir::Etc::SourceParts=- -o Dir::State::Lists=$PWD/lists"
$apt update
$apt -o APT::Sandbox::User=root source --download-only libjpeg-turbo
dpkg-source --no-check -x libjpeg-turbo_*.dsc source
# Without SIMD, whose assembler code has no instrumentation.
cmake -S source -B build -DENABLE_STATIC=0 -DWITH_TURBOJPEG=0 -DWITH_TOOLS=0 -DWITH_TESTS=0 -DWITH_SIMD=0 \
    -DCMAKE_BUILD_TYPE=None -DCMAKE_C_FLAGS="-O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all"
make -C build -j2 jpeg
cp build/libjpeg.so.62 libjpeg.so.62
