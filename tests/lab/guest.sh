# The second program of the guest. It sets up the devices that guest.env names, runs the command and
# powers off.
#
# MEDIUM   none, fsdax (/run/pmem, ext4 -o dax) or devdax (/dev/dax0.0)
# RDMA     1: soft-RoCE rdma0 on eth0
# SECONDS_MAX  limit of the command
#
# The command's output goes to the port "output", its exit status to the file status.
. /run/share/guest.env
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/run TERM=dumb
for port in /sys/class/virtio-ports/*; do
  [ "$(cat "$port/name")" = output ] && exec >"/dev/${port##*/}" 2>&1
done

off() {
  echo "$1" >/run/share/status
  sync
  echo o >/proc/sysrq-trigger
  sleep 10
  busybox poweroff -f
}
fail() {
  echo "guest: $*"
  off 125
}
appears() {
  for _ in $(seq 100); do
    [ -e "$1" ] && return
    sleep 0.1
  done
  fail "$1 did not appear"
}

modprobe virtio_net
ip link set lo up
for number in 0 1; do
  appears /sys/class/net/eth$number
  ip link set eth$number mtu 4200 up
  ip address add 10.9.$number.1/24 dev eth$number
done

namespace_mode() { cat /sys/bus/nd/devices/namespace0.0/mode; }
if [ "$MEDIUM" != none ]; then
  for module in nfit nd_pmem dax_pmem device_dax; do
    modprobe $module >/run/modprobe 2>&1 || fail "no module $module: $(cat /run/modprobe)"
  done
  appears /sys/bus/nd/devices/namespace0.0
  # A new image is "raw". An image of an earlier boot keeps its mode and its content.
  if [ "$(namespace_mode)" = raw ]; then
    ndctl create-namespace --force --reconfig namespace0.0 --mode "$MEDIUM" --map mem \
      >/run/ndctl 2>&1 || fail "ndctl: $(cat /run/ndctl)"
    FRESH=1
  fi
fi
case "$MEDIUM" in
  fsdax)
    modprobe ext4
    appears /dev/pmem0
    [ -z "${FRESH-}" ] || mkfs.ext4 -q -F -b 4096 /dev/pmem0 || fail mkfs
    mkdir -p /run/pmem
    mount -o dax /dev/pmem0 /run/pmem || fail "mount -o dax"
    ;;
  devdax) appears /dev/dax0.0 ;;
esac
if [ "$RDMA" = 1 ]; then
  modprobe rdma_rxe && modprobe rdma_ucm || fail "no module rdma_rxe"
  rdma link add rdma0 type rxe netdev eth0 || fail "rdma link add"
  appears /dev/infiniband/uverbs0
fi

timeout --kill-after 10 "$SECONDS_MAX" bash -c "cd '$TREE' && . /run/share/command.sh" </dev/null
status=$?
cd /
[ "$MEDIUM" = fsdax ] && umount /run/pmem
off $status
