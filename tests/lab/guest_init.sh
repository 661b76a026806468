#!/bin/busybox sh
# The first program of the guest, in its initramfs. It builds / from the host's folders and runs
# guest.sh. The host's / is read-only over 9p. Writes outside the shared folder stay in memory.
B=/bin/busybox
fail() {
  echo "guest_init: $*" >/dev/console
  $B poweroff -f
}
$B mount -t proc proc /proc
$B mount -t sysfs sysfs /sys
$B mount -t devtmpfs devtmpfs /dev
while read -r module; do $B insmod "/modules/$module" || fail "insmod $module"; done </modules/order
OPTIONS=trans=virtio,version=9p2000.L,msize=512000
$B mount -t 9p -o $OPTIONS,ro,cache=loose root /lower || fail "mount of the host's root"
$B mount -t tmpfs -o size=75% upper /upper
$B mkdir /upper/changed /upper/work
$B mount -t overlay -o lowerdir=/lower,upperdir=/upper/changed,workdir=/upper/work overlay /new ||
  fail "mount of the overlay"
for folder in proc sys dev run tmp; do $B mkdir -p /new/$folder; done
$B mount -t proc proc /new/proc
$B mount -t sysfs sysfs /new/sys
$B mount -t devtmpfs devtmpfs /new/dev
$B mount -t tmpfs run /new/run
$B mkdir -p /new/dev/pts /new/dev/shm /new/run/share
$B mount -t devpts devpts /new/dev/pts
$B mount -t tmpfs shm /new/dev/shm
for name in fd:/proc/self/fd stdin:/proc/self/fd/0 stdout:/proc/self/fd/1 stderr:/proc/self/fd/2; do
  $B ln -sf "${name#*:}" "/new/dev/${name%%:*}"
done
$B mount -t 9p -o $OPTIONS,cache=mmap share /new/run/share || fail "mount of the shared folder"
. /new/run/share/guest.env
case "$TREE" in
  /tmp/*) ;; # the repository itself is in /tmp: keep the host's /tmp
  *) $B mount -t tmpfs tmp /new/tmp ;;
esac
$B mkdir -p "/new/usr/lib/modules/$KERNEL" "/new$SHARE"
$B mount --bind "/new$MODULES" "/new/usr/lib/modules/$KERNEL" || fail "mount of the modules"
$B mount --bind /new/run/share "/new$SHARE" || fail "mount of $SHARE"
exec $B switch_root /new /bin/bash "$TREE/tests/lab/guest.sh"
