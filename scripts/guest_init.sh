#!/bin/sh
# The first program of a virtual machine, in its initramfs: loads the kernel's modules, puts the root file system together
# from three disks, sets up the network, and becomes the agent. Nothing of the template is executed, and nothing of this is
# left afterwards. What differs between machines is on the kernel's command line:
#   space.disks=TEMPLATE,LAYER,SPACE   devices: the template and /.space (erofs), and the machine's own layer (ext4)
#   space.link=V4/BITS,GATEWAY,V6/BITS,GATEWAY   addresses of eth0
#   space.channel=vsock:PORT   where the agent listens for the host; without it the channel is the one port of a serial device
set -eu
mount -t devtmpfs -o mode=0755,nosuid dev /dev
mount -t proc -o nosuid,noexec,nodev proc /proc
mount -t sysfs -o nosuid,noexec,nodev sys /sys
while read -r module; do insmod "/modules/$module"; done </modules/order

disks= link= channel=
for word in $(cat /proc/cmdline); do
    case $word in
        space.disks=*) disks=${word#*=} ;;
        space.link=*) link=${word#*=} ;;
        space.channel=*) channel=${word#*=} ;;
    esac
done

IFS=,
# shellcheck disable=SC2086  # words between commas
set -- $disks
mount -t erofs -o ro,nodev "/dev/$1" /template
mount -t ext4 -o noatime,nodev "/dev/$2" /layer
mkdir -p /layer/upper /layer/work
# With xino files of both disks are of one device, as programs expect of one file system (the agent does, too).
mount -t overlay -o noatime,xino=on,lowerdir=/template,upperdir=/layer/upper,workdir=/layer/work root /root
# Whatever the template lacks, or the machine's last user has left there.
for name in .space dev proc run sys; do
    if [ ! -d "/root/$name" ] || [ -L "/root/$name" ]; then
        rm -rf "/root/$name"
        mkdir "/root/$name"
    fi
done
mount -t erofs -o ro,nosuid,nodev "/dev/$3" /root/.space

# shellcheck disable=SC2086
set -- $link
ip link set lo up
if [ -e /sys/class/net/eth0 ]; then
    # Nobody else is there to have the address, or to say what the network is.
    echo 0 >/proc/sys/net/ipv6/conf/eth0/accept_dad
    echo 0 >/proc/sys/net/ipv6/conf/eth0/accept_ra
    ip address add "$1" dev eth0
    ip -6 address add "$3" dev eth0
    ip link set eth0 up
    ip route add default via "$2"
    ip -6 route add default via "$4" dev eth0
fi
unset IFS

# Memory is the machine's own, and promised: programs that ask for more than there is are told so early enough.
# Each command is born into a group of its own, so moving into one is to be quick, if the kernel knows how.
mount -t cgroup2 -o nosuid,noexec,nodev,favordynmods cgroup /sys/fs/cgroup ||
    mount -t cgroup2 -o nosuid,noexec,nodev cgroup /sys/fs/cgroup
for controller in cpu memory pids; do
    echo "+$controller" >/sys/fs/cgroup/cgroup.subtree_control
done
# The agent's group, which this becomes: what it uses is counted there from the first page on.
mkdir /sys/fs/cgroup/agent
echo $$ >/sys/fs/cgroup/agent/cgroup.procs
mkdir -p /dev/pts /dev/shm
mount -t devpts -o nosuid,noexec,gid=5,mode=0620,ptmxmode=0666 devpts /dev/pts
mount -t tmpfs -o mode=1777,nosuid,nodev shm /dev/shm
for name in fd:fd stdin:fd/0 stdout:fd/1 stderr:fd/2; do
    ln -sf "/proc/self/${name#*:}" "/dev/${name%:*}"
done
mount -t tmpfs -o mode=0755,nosuid,nodev run /root/run
for directory in dev proc sys; do
    mount --move "/$directory" "/root/$directory"
done

cd /root
if [ "$channel" ]; then
    set -- --channel "$channel"
    exec <>/root/dev/null >&0 2>&0
else
    turns=0
    set -- /dev/none
    until [ -c "$1" ]; do # the ports of a device are made known one by one, after it is there
        turns=$((turns + 1))
        [ "$turns" -lt 5000 ] || exit 1
        usleep 2000
        set -- /root/dev/vport*p1
    done
    # Standard input and output are the channel. Its device can be opened once, which the agent now has done.
    exec <>"$1" >&0 2>/dev/null
    set --
fi
ulimit -n 65536
exec env -i PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    switch_root /root /.space/lib/ld-linux-x86-64.so.2 --library-path /.space/lib \
    /.space/bin/python3 -I -S /.space/agent.pyz "$@"
