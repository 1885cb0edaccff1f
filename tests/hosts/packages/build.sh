#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Builds the apt repository of the simulated hosts: packages with the names, versions, dependencies and files of
# NVIDIA's container stack, whose programs work on the simulated driver. Usage: build.sh [folder], .build/demo-apt by default.
set -eu

here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../../.." && pwd)
out=${1:-$root/.build/demo-apt}
work=$root/.build/demo-apt-work
architecture=$(dpkg --print-architecture)
multiarch=$(${CC:-cc} -print-multiarch 2>/dev/null || true)
multiarch=${multiarch:-$(uname -m)-linux-gnu}

# Two toolkit versions, so that a pin, an upgrade and a rollback can be tested; apt installs the newer one by default.
toolkit_versions="1.19.1 1.20.0"

stamp=$(cd "$here" && find build.sh src debian -type f | LC_ALL=C sort | xargs sha256sum | sha256sum | cut -c1-32)-$architecture
if [ "$(cat "$out/.stamp" 2>/dev/null || true)" = "$stamp" ]; then
    echo "packages: $out is up to date"
    exit 0
fi

rm -rf "$work" "$out"
mkdir -p "$work" "$out/pool"
# All files and archives get one date, so that the same sources build identical packages.
export SOURCE_DATE_EPOCH=1700000000

# install_file <mode> <source> <destination in the package>; @VERSION@ in the source becomes the package's version.
install_file() {
    mkdir -p "$tree/$(dirname "$3")"
    # The sources have no interpreter line, because the collection's checks treat them as modules, so the line is added
    # here.
    case "$2" in *.py) echo '#!/usr/bin/python3' >"$tree/$3" ;; *) : >"$tree/$3" ;; esac
    sed "s/@VERSION@/$upstream/g" "$here/src/$2" >>"$tree/$3"
    chmod "$1" "$tree/$3"
}

# begin <package> <version-revision>: an empty package tree.
begin() {
    package=$1
    version=$2
    upstream=${version%-*}
    tree=$work/${package}_$version
    mkdir -p "$tree/DEBIAN" "$tree/usr/share/doc/$package"
    echo "Stand-in of $package for simulated hosts. Apache-2.0; holds nothing of NVIDIA's." \
        >"$tree/usr/share/doc/$package/copyright"
    for script in preinst postinst prerm postrm conffiles; do
        if [ -e "$here/debian/$package.$script" ]; then
            cp "$here/debian/$package.$script" "$tree/DEBIAN/$script"
            chmod 755 "$tree/DEBIAN/$script"
            [ "$script" != conffiles ] || chmod 644 "$tree/DEBIAN/$script"
        fi
    done
}

# finish <description>, with further control lines on standard input.
finish() {
    {
        echo "Package: $package"
        echo "Version: $version"
        echo "Architecture: $architecture"
        echo "Maintainer: vgpu.fleet maintainers <maintainers@vgpu-fleet.invalid>"
        echo "Section: utils"
        echo "Priority: optional"
        grep -v '^$' || true
        echo "Description: $1"
        echo " Stand-in for hosts with a simulated driver; never install it on a real one."
    } >"$tree/DEBIAN/control"
    find "$tree" -exec touch -h -d "@$SOURCE_DATE_EPOCH" {} +
    dpkg-deb --root-owner-group -Zgzip --build "$tree" "$out/pool/${package}_${version}_$architecture.deb" >/dev/null
}

for upstream in $toolkit_versions; do
    version=$upstream-1

    begin libnvidia-container1 "$version"
    mkdir -p "$tree/usr/lib/$multiarch"
    major=${upstream%%.*}
    rest=${upstream#*.}
    ${CC:-cc} -std=c11 -O2 -Wall -Wextra -Werror -shared -fPIC -Wl,-soname,libnvidia-container.so.1 \
        -DNVC_MAJOR="$major" -DNVC_MINOR="${rest%.*}" -DNVC_PATCH="${rest#*.}" -DNVC_STRING="\"$upstream\"" \
        -o "$tree/usr/lib/$multiarch/libnvidia-container.so.$upstream" "$here/src/libnvidia_container.c"
    ln -s "libnvidia-container.so.$upstream" "$tree/usr/lib/$multiarch/libnvidia-container.so.1"
    finish "NVIDIA container runtime library (stand-in)" <<-END
		Depends: libc6
	END

    begin libnvidia-container-tools "$version"
    install_file 755 nvidia_container_cli.py usr/bin/nvidia-container-cli
    finish "NVIDIA container runtime library, command-line tools (stand-in)" <<-END
		Depends: libnvidia-container1 (>= $version), python3
	END

    begin nvidia-container-toolkit-base "$version"
    install_file 755 nvidia_container_runtime.py usr/bin/nvidia-container-runtime
    install_file 755 nvidia_ctk.py usr/bin/nvidia-ctk
    install_file 644 config.toml usr/share/nvidia-container-toolkit/config.toml
    install_file 644 nvidia-cdi-refresh.service lib/systemd/system/nvidia-cdi-refresh.service
    install_file 644 nvidia-cdi-refresh.path lib/systemd/system/nvidia-cdi-refresh.path
    finish "NVIDIA Container Toolkit Base (stand-in)" <<-END
		Depends: python3
		Breaks: nvidia-container-runtime (<= 3.5.0-1), nvidia-container-toolkit (<= 1.10.0-1)
		Replaces: nvidia-container-runtime (<= 3.5.0-1), nvidia-container-toolkit (<= 1.10.0-1)
	END

    begin nvidia-container-toolkit "$version"
    install_file 755 nvidia-container-runtime-hook usr/bin/nvidia-container-runtime-hook
    ln -s nvidia-container-runtime-hook "$tree/usr/bin/nvidia-container-toolkit"
    finish "NVIDIA Container toolkit (stand-in)" <<-END
		Depends: nvidia-container-toolkit-base (= $version), libnvidia-container-tools (= $version)
		Breaks: nvidia-container-runtime (<= 3.5.0-1), nvidia-container-runtime-hook
		Replaces: nvidia-container-runtime (<= 3.5.0-1), nvidia-container-runtime-hook
	END
done

# The last release of nvidia-docker2 is a meta package. The release before it, 2.13.0, still contains the wrapper and
# owns /etc/docker/daemon.json, so a removal of 2.13.0 can affect that file.
begin nvidia-docker2 2.14.0-1
rm -f "$tree/DEBIAN/conffiles"
finish "nvidia-docker CLI wrapper, transitional (stand-in)" <<-END
	Depends: nvidia-container-toolkit (>= 1.13.0-1)
END

begin nvidia-docker2 2.13.0-1
install_file 755 nvidia-docker usr/bin/nvidia-docker
install_file 644 nvidia-docker2-daemon.json etc/docker/daemon.json
finish "nvidia-docker CLI wrapper (stand-in)" <<-END
	Depends: nvidia-container-toolkit (>= 1.13.0-1), docker-ce (>= 18.06.0) | docker.io (>= 18.06.0)
END

(
    cd "$out"
    dpkg-scanpackages --multiversion pool 2>/dev/null >Packages
    gzip -9nk Packages
    {
        echo "Origin: vgpu.fleet simulated hosts"
        echo "Label: NVIDIA container stack (stand-in)"
        echo "Suite: ./"
        echo "Architectures: $architecture"
        echo "Date: $(LC_ALL=C date -u -R -d "@$SOURCE_DATE_EPOCH")"
        echo "SHA256:"
        for index in Packages Packages.gz; do
            echo " $(sha256sum "$index" | cut -d' ' -f1) $(wc -c <"$index") $index"
        done
    } >Release
)
echo "$stamp" >"$out/.stamp"
rm -rf "$work"
echo "packages: $(grep -c '^Package: ' "$out/Packages") packages in $out"
