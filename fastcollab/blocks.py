"""A model's KV blocks: reference counts, the free queue, and the content cache that prompts share through."""

from __future__ import annotations

from collections import OrderedDict


class BlockPool:
    """Blocks of one model: reference counts, a free queue, and the content cache.

    A freed block that is published keeps its content and joins the queue's end; an unpublished one goes to its front.
    An entry (prefix tokens -> block) is valid until the block is taken from the queue or written below its length.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.ref = [0] * num_blocks
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self.entries: dict[tuple[int, ...], int] = {}
        self.published: list[list[tuple[int, ...]]] = [[] for _ in range(num_blocks)]

    def allocate(self) -> int:
        block, _ = self.free.popitem(last=False)
        self.unpublish(block, 0)
        self.ref[block] = 1
        return block

    def share(self, block: int) -> None:
        if self.ref[block] == 0:
            del self.free[block]
        self.ref[block] += 1

    def release(self, block: int) -> None:
        assert self.ref[block] > 0, "double free"
        self.ref[block] -= 1
        if self.ref[block] == 0:
            self.free[block] = None
            self.free.move_to_end(block, last=bool(self.published[block]))

    def publish(self, prefix: tuple[int, ...], block: int) -> None:
        if prefix not in self.entries:
            self.entries[prefix] = block
            self.published[block].append(prefix)

    def unpublish(self, block: int, offset: int) -> None:
        """Drop the entries of ``block`` that cover more than its first ``offset`` slots."""
        kept = []
        for prefix in self.published[block]:
            if (len(prefix) - 1) % self.block_size + 1 > offset:
                del self.entries[prefix]
            else:
                kept.append(prefix)
        self.published[block] = kept

    def clear(self) -> None:
        self.entries.clear()
        self.published = [[] for _ in self.published]
