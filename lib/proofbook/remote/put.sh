# Writes standard input to a file so that the file is always either the old one or the new one. POSIX sh.
# Arguments: path, mode, 1 to keep the old content or 0, the sha256 that the new content must have.
# Prints "backup path" if an old content was kept, then "sha256 digest" as read back from the disk.
LC_ALL=C
export LC_ALL
umask 077
path=$1 mode=$2 keep=$3 want=$4
dir=${path%/*}
[ -n "$dir" ] || dir=/
new=
fail() { [ -z "$new" ] || rm -f -- "$new"; printf '%s\n' "$1" >&2; exit 1; }

# WHY: a rename would replace the link by a file and leave its target as it was, which looks like success.
[ ! -L "$path" ] || fail "$path is a symbolic link to $(readlink -- "$path"): name the file that it leads to"
[ ! -e "$path" ] || [ -f "$path" ] || fail "$path is not a regular file"
[ -d "$dir" ] || fail "$dir is not a folder"

new=$(mktemp "$dir/.proofbook.XXXXXX") || fail "no file can be made in $dir"
trap 'rm -f -- "$new"' EXIT
trap 'exit 143' HUP INT TERM
# The rename must not overtake the data on its way to the disk: a power cut would leave an empty file.
dd of="$new" bs=65536 conv=fsync 2> /dev/null || fail "writing $new failed (is the disk full?)"
got=$(sha256sum < "$new") || fail "sha256sum failed"
got=${got%% *}
[ "$got" = "$want" ] || fail "the content arrived damaged: sha256 $got instead of $want"
chmod "$mode" -- "$new" || fail "chmod $mode failed"

if [ -f "$path" ]; then
  owner=$(stat -c %u:%g -- "$path") && chown "$owner" -- "$new" || fail "the owner of $path cannot be kept"
  if [ "$keep" = 1 ]; then
    stamp=$(date -u +%Y%m%dT%H%M%SZ)
    backup=$path.proofbook-$stamp
    n=1
    while [ -e "$backup" ]; do n=$((n + 1)); backup=$path.proofbook-$stamp-$n; done
    cp -p -- "$path" "$backup" && sync "$backup" || fail "the backup $backup could not be written"
    printf 'backup %s\n' "$backup"
  fi
fi
mv -f -- "$new" "$path" || fail "renaming to $path failed"
if command -v restorecon > /dev/null; then restorecon -- "$path"; fi
sync "$dir" || sync
got=$(sha256sum < "$path") || fail "$path cannot be read back"
printf 'sha256 %s\n' "${got%% *}"
