#!/usr/bin/env bash
# Builds a real Kubernetes (kube-apiserver, kube-controller-manager, kube-scheduler, kubelet 1.20.2) from Debian bookworm's
# source package, and unpacks the etcd, containerd, runc and CNI plugins beside it, for tests. Nothing is installed: all of it
# lies in DIR. On two cores it takes about ten minutes the first time, and nothing after that.
#
#   scripts/kubernetes_build.sh DIR
#
# Needs Debian 12 with apt's package lists (apt-get update), root, and 6 GB in DIR while it builds (0.6 GB after that).
set -euo pipefail
dir=$(mkdir -p "$1" && cd "$1" && pwd)
if [ -e "$dir/complete" ]; then echo "$dir is complete"; exit 0; fi
# shellcheck disable=SC1091
suite=$(. /etc/os-release && echo "$ID-$VERSION_CODENAME")
[ "$suite" = debian-bookworm ] || { echo "this is $suite: the versions here are those of Debian 12 (bookworm)" >&2; exit 2; }

programs="kube-apiserver kube-controller-manager kube-scheduler kubelet"
mkdir -p "$dir/bin" "$dir/debs" "$dir/root" "$dir/src" "$dir/lists/partial"

echo "--- packages"
cd "$dir/debs"
apt-get -qq -o APT::Sandbox::User=root download golang-1.19-go golang-1.19-src golang-github-modern-go-reflect2-dev \
  etcd-server containerd runc containernetworking-plugins libseccomp2 libbtrfs0
for deb in *.deb; do dpkg -x "$deb" "$dir/root"; done
cp "$dir/root/usr/bin/etcd" "$dir/root/usr/bin/containerd" "$dir/root/usr/bin/containerd-shim-runc-v2" "$dir/root/usr/bin/ctr" \
  "$dir/root/usr/sbin/runc" "$dir/bin/"
mkdir -p "$dir/cni" && cp -L "$dir"/root/usr/lib/cni/{bridge,host-local,loopback} "$dir/cni/"

echo "--- source"
mirror=$(grep -rhoE 'https?://[^ ]+/debian/?( |$)' /etc/apt/sources.list.d /etc/apt/sources.list 2>/dev/null |
  head -1 | tr -d ' ' || true)
echo "deb-src [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror bookworm main" >"$dir/src.list"
apt="apt-get -qq -o Dir::Etc::SourceList=$dir/src.list -o Dir::Etc::SourceParts=/dev/null -o Dir::State::Lists=$dir/lists
  -o Dir::Cache::pkgcache= -o Dir::Cache::srcpkgcache= -o APT::Sandbox::User=root"
cd "$dir/src"
$apt update
$apt source --download-only kubernetes

export GOROOT=$dir/root/usr/lib/go-1.19 GO111MODULE=off GOFLAGS='' GOPATH=$dir/gopath GOCACHE=$dir/gocache CGO_ENABLED=0
PATH=$GOROOT/bin:$PATH
k=$GOPATH/src/k8s.io/kubernetes
rm -rf "$k" && mkdir -p "$k" && tar xzf kubernetes_*.orig.tar.gz --strip-components 1 -C "$k"
# The vendored reflect2 faults with Go 1.18 and later; Debian's is newer.
rm -rf "$k/vendor/github.com/modern-go/reflect2"
cp -rL "$dir/root/usr/share/gocode/src/github.com/modern-go/reflect2" "$k/vendor/github.com/modern-go/"
# /version comes from client-go, --version from component-base.
for base in component-base/version/base.go client-go/pkg/version/base.go; do
  sed -i -e 's/^\tgitVersion .*/\tgitVersion string = "v1.20.2"/; s/^\tgitMajor [^/]*/\tgitMajor string = "1" /' \
    -e 's/^\tgitMinor [^/]*/\tgitMinor string = "20" /' "$k/staging/src/k8s.io/$base"
done
cd "$k"
echo "--- the OpenAPI definitions, the one generated file that the source lacks"
go build -o "$dir/openapi-gen" k8s.io/kubernetes/vendor/k8s.io/kube-openapi/cmd/openapi-gen
packages=$(grep -rl '+k8s:openapi-gen=true' --include='*.go' pkg/apis staging/src/k8s.io cmd | xargs -n1 dirname | sort -u |
  grep -v -E '/(testdata|code-generator|sample-|examples)' |
  sed -e 's#^staging/src/#k8s.io/kubernetes/vendor/#' -e 's#^\(pkg\|cmd\)/#k8s.io/kubernetes/\1/#' | paste -sd,)
"$dir/openapi-gen" --logtostderr -i "$packages" -p k8s.io/kubernetes/pkg/generated/openapi -O zz_generated.openapi \
  -h hack/boilerplate/boilerplate.generatego.txt -r /dev/null --output-base "$GOPATH/src"
for program in $programs; do
  echo "--- $program"
  go build -ldflags "-s -w" -o "$dir/bin/" "k8s.io/kubernetes/cmd/$program"
done
echo "--- pause"
cat >"$dir/pause.go" <<'GO'
package main

import ("os"; "os/signal"; "syscall")

func main() {
	ends := make(chan os.Signal, 1)
	signal.Notify(ends, syscall.SIGTERM, syscall.SIGINT)
	<-ends
}
GO
go build -ldflags "-s -w" -o "$dir/bin/pause" "$dir/pause.go"
rm -rf "$GOPATH" "$GOCACHE" "$dir/lists" "$dir/src" "$dir/debs" "$dir/openapi-gen" "$dir/pause.go" "$dir/src.list"
rm -rf "$dir/root/usr/lib/go-1.19" "$dir/root/usr/share"
touch "$dir/complete"
du -sh "$dir"
