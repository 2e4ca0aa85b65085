# Sourced by the scripts beside it: where things go, how a step is shown, and how one fails. POSIX sh.
# shellcheck shell=sh

PREFIX=/opt/space
CACHE=/var/cache/space
LOGS=/var/log/space
STAMPS=$PREFIX/stamps
SYSTEM_PYTHON=/usr/bin/python3
PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
export PATH
umask 022

# now_ms: milliseconds since the epoch.
now_ms() { date +%s%3N; }

# seconds_since MS: "12.3 s" since that time.
seconds_since() {
    ms=$(($(now_ms) - $1))
    printf '%d.%d s' $((ms / 1000)) $((ms % 1000 / 100))
}

# need_root NAME ARGS…: run this script again as root through sudo when it is not.
need_root() {
    [ "$(id -u)" -eq 0 ] && return 0
    if command -v sudo >/dev/null 2>&1; then
        echo "This needs root (system packages, users, mounts): asking sudo." >&2
        exec sudo -- "$@"
    fi
    echo "This needs root and there is no sudo here: run it as root." >&2
    exit 1
}

# fail WHAT ADVICE: end this script, saying what is wrong and what would help.
fail() {
    printf 'Failed: %s\nWhat to do: %s\n' "$1" "$2" >&2
    exit 1
}

# begin_log NAME: later steps write to $LOGS/NAME.log; the log of the run before is kept once.
begin_log() {
    mkdir -p "$LOGS"
    chmod 0755 "$LOGS"
    STEP_LOG=$LOGS/$1.log
    [ ! -e "$STEP_LOG" ] || mv -f "$STEP_LOG" "$STEP_LOG.1"
    (umask 077 && : >"$STEP_LOG")
}

# step TITLE COMMAND…: show the title at once, run quietly into the log, show how long it took.
step() {
    title=$1
    shift
    printf '  %-58s' "$title"
    started=$(now_ms)
    printf '\n=== %s: %s\n' "$(date -u +%FT%TZ)" "$title" >>"$STEP_LOG"
    # Not as a condition: there the shell would go on after a failure inside a function.
    set +e
    (
        set -e
        "$@"
    ) >>"$STEP_LOG" 2>&1 </dev/null
    step_status=$?
    set -e
    if [ "$step_status" -eq 0 ]; then
        printf '%9s\n' "$(seconds_since "$started")"
        return 0
    fi
    printf '   FAILED after %s\n\n' "$(seconds_since "$started")"
    tail -n 12 "$STEP_LOG" | sed 's/^/    /' >&2
    printf '\nThe step "%s" failed; everything it printed is in %s.\n' "$title" "$STEP_LOG" >&2
    printf 'Repeat the command when the cause is gone: finished steps are not done again.\n' >&2
    exit 1
}

# hash_of DIR PATH…: one hash over the names and bytes of files and trees in DIR (bytecode left out), in a fixed order; the
# same wherever DIR is.
hash_of() (
    cd "$1" || exit 1
    shift
    find "$@" -name __pycache__ -prune -o -type f -print | LC_ALL=C sort | xargs -d '\n' sha256sum | sha256sum | cut -c1-32
)

# is_done NAME HASH: whether that step was finished for exactly these inputs.
is_done() { [ "$(cat "$STAMPS/$1" 2>/dev/null)" = "$2" ]; }

# set_done NAME HASH: remember it. Written last, so that a step that was cut off is done again.
set_done() {
    mkdir -p "$STAMPS"
    printf '%s\n' "$2" >"$STAMPS/$1.new"
    mv -f "$STAMPS/$1.new" "$STAMPS/$1"
}

# os_release KEY: a field of /etc/os-release, e.g. VERSION_CODENAME.
os_release() { (. /etc/os-release && eval "printf '%s' \"\${$1:-}\""); }

# fetch_debs DIR APT_OPTION… -- PACKAGE…: download (signatures checked by apt) into DIR, refreshing old package lists once.
fetch_debs() {
    fetch_dir=$1
    shift
    fetch_options=
    while [ "$1" != -- ]; do
        fetch_options="$fetch_options $1"
        shift
    done
    shift
    rm -rf "$fetch_dir"
    mkdir -p "$fetch_dir"
    ! id _apt >/dev/null 2>&1 || chown _apt "$fetch_dir"
    # shellcheck disable=SC2086  # the options are words without blanks
    (cd "$fetch_dir" && apt-get -q $fetch_options download "$@") ||
        { apt-get -q $fetch_options update && (cd "$fetch_dir" && apt-get -q $fetch_options download "$@"); } ||
        fail "apt could not download: $*" "look at apt's message above; check the network and /etc/apt/sources.list.d"
}
