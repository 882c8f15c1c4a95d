#!/bin/sh
# How fast updates are on this GPU: one arm with each attention kernel, then all arms at once with the faster one.
#     sh lab/ladder/bench.sh TOKENS KEPT OUT
here=$(dirname "$0")
for attention in flash cudnn; do
    ARMS=softmax WITHOUT_MPS=1 sh "$here/device.sh" 100 "$1" "$2" "$3" --bench-s 5 --attention $attention | tee "$3/alone-$attention.log"
done
faster=$(for attention in flash cudnn; do
    echo "$(sed -n 's/.* \([0-9.]*\) M tokens.*/\1/p' "$3/alone-$attention.log") $attention"
done | sort -n | tail -1 | cut -d' ' -f2)
echo "faster: $faster"
sh "$here/device.sh" 100 "$1" "$2" "$3" --bench-s 20 --attention "$faster" | tee "$3/together.log"
