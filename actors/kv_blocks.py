"""Who holds which block of KV rows. Counts blocks and shares equal prefixes; never sees a tensor."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable

from hotneuron.actors.sequence import Sequence
from hotneuron.models.errors import RequestError

BLOCK_TOKENS = 16

# What a full block holds: (number of the parent's content, the block's tokens). Numbers are given out once and never
# again, and a dict compares whole keys, so blocks with equal hashes but other tokens are never taken for each other.
Content = tuple[int, tuple[int, ...]]

_ROOT = 0  # content number of the empty prefix


class KVBlocks:
    """Reference-counted blocks of `block_tokens` KV rows each, in one of three states.

    *free*: holds nothing of use. *held*: in the block table of one or more sequences. *cached*: held by nobody, but its
    rows are known and a new sequence with the same prefix may take it; given up in least-recently-released order.
    """

    def __init__(self, n_blocks: int, block_tokens: int = BLOCK_TOKENS):
        if n_blocks < 1 or block_tokens < 1:
            raise RequestError(
                f"KV cache of {n_blocks} blocks of {block_tokens} tokens; give at least one block of one token"
            )
        self.n_blocks = n_blocks
        self.block_tokens = block_tokens
        self.n_hit_blocks = 0  # blocks taken from the prefix cache since the start
        self._free: list[int] = list(range(n_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # oldest release first
        self._n_holders: list[int] = [0] * n_blocks
        self._content: list[Content | None] = [None] * n_blocks  # of blocks in _by_content only
        self._number: list[int] = [_ROOT] * n_blocks  # content number of a full, computed block
        self._by_content: dict[Content, int] = {}
        self._last_number = _ROOT

    @property
    def n_available_blocks(self) -> int:
        """Blocks that a sequence can get now: free ones, and cached ones at the cost of their rows."""
        return len(self._free) + len(self._cached)

    @property
    def n_tokens(self) -> int:
        return self.n_blocks * self.block_tokens

    def blocks_for(self, n_tokens: int) -> int:
        """Blocks that hold `n_tokens` rows."""
        return -(-n_tokens // self.block_tokens)

    def n_missing_blocks(self, sequence: Sequence, n_tokens: int) -> int:
        """Blocks that the sequence lacks to hold its first `n_tokens` rows."""
        return max(0, self.blocks_for(n_tokens) - len(sequence.block_table))

    def can_allocate(self, sequence: Sequence, n_reserved_blocks: int = 0) -> bool:
        """Whether all tokens of a sequence without blocks fit beside `n_reserved_blocks` promised to others."""
        n_room = self.n_available_blocks - n_reserved_blocks
        n_needed = self.blocks_for(sequence.n_tokens)
        if n_needed <= n_room:
            return True
        matched = self._match(sequence)
        # A match that someone holds costs nothing; a cached one uses up an available block like any other.
        return n_needed - sum(self._n_holders[block] > 0 for block in matched) <= n_room

    def allocate(self, sequence: Sequence) -> int:
        """Gives a sequence the computed blocks of its prefix, from its first uncomputed token on.

        The last token is never covered: it must be fed to have logits. Returns the number of tokens that need no
        computing now; also useful in the middle of a prompt, when another sequence has computed what comes next.
        """
        if sequence.n_hashed_blocks != len(sequence.block_table):
            return 0  # the next row goes into a block that the sequence has already
        matched = self._match(sequence)
        for block in matched:
            self._cached.pop(block, None)
            self._n_holders[block] += 1
        sequence.block_table += matched
        sequence.n_hashed_blocks += len(matched)
        n_tokens = len(matched) * self.block_tokens
        sequence.n_computed_tokens += n_tokens
        self.n_hit_blocks += len(matched)
        return n_tokens

    def extend(self, sequence: Sequence, n_tokens: int) -> bool:
        """Grows the block table to hold the first `n_tokens` rows. False, and nothing changed, if blocks are short."""
        n_missing = self.n_missing_blocks(sequence, n_tokens)
        if n_missing > self.n_available_blocks:
            return False
        for _ in range(n_missing):
            block = self._free.pop() if self._free else self._evict()
            self._n_holders[block] = 1
            sequence.block_table.append(block)
        return True

    def mark_computed(self, sequence: Sequence) -> None:
        """Offers the sequence's full blocks for sharing; call it after `n_computed_tokens` grew."""
        size = self.block_tokens
        n_full = sequence.n_computed_tokens // size
        if n_full <= sequence.n_hashed_blocks:
            return
        table = sequence.block_table
        parent = self._number[table[sequence.n_hashed_blocks - 1]] if sequence.n_hashed_blocks else _ROOT
        for index in range(sequence.n_hashed_blocks, n_full):
            block = table[index]
            content = (parent, tuple(sequence.tokens[index * size : (index + 1) * size]))
            twin = self._by_content.get(content)
            if twin is None:
                self._last_number += 1
                self._number[block] = self._last_number
                self._content[block] = content
                self._by_content[content] = block
            else:
                # Two sequences computed the same rows side by side. Both keep their own: workers may be using them.
                self._number[block] = self._number[twin]
            parent = self._number[block]
        sequence.n_hashed_blocks = n_full

    def release(self, sequence: Sequence) -> None:
        """Takes all blocks from the sequence, whose rows then count as not computed."""
        # Last block first, so that a prefix outlives what hangs on it.
        for block in reversed(sequence.block_table):
            self._n_holders[block] -= 1
            assert self._n_holders[block] >= 0, f"block {block} released more often than held"
            if self._n_holders[block] == 0:
                if self._content[block] is None:
                    self._number[block] = _ROOT
                    self._free.append(block)
                else:
                    self._cached[block] = None
        sequence.block_table.clear()
        sequence.n_hashed_blocks = 0
        sequence.n_computed_tokens = 0

    def forget_all(self) -> None:
        """Drops every cached row, for when workers lost them. All sequences must have been released."""
        assert not any(self._n_holders), "forget_all while sequences hold blocks"
        while self._cached:
            self._free.append(self._evict())

    def check_integrity(self, holders: Iterable[Sequence] = ()) -> None:
        """Asserts that each block is in exactly one state and that counts equal the block tables of `holders`."""
        held = Counter(block for sequence in holders for block in sequence.block_table)
        assert all(self._n_holders[block] == held[block] for block in range(self.n_blocks)), "holders miscounted"
        states = [*self._free, *self._cached, *held]
        assert sorted(states) == list(range(self.n_blocks)), "a block is lost, or in two states"
        known = {content: block for block, content in enumerate(self._content) if content is not None}
        assert known == self._by_content, "prefix index and blocks disagree"
        assert all(self._content[block] is not None for block in self._cached), "cached block of unknown content"
        assert all(self._content[block] is None for block in self._free), "free block offered for sharing"
        numbers = [self._number[block] for block in known.values()]
        assert len(set(numbers)) == len(numbers) and _ROOT not in numbers, "content number given out twice"

    def _match(self, sequence: Sequence) -> list[int]:
        size = self.block_tokens
        first = len(sequence.block_table)
        parent = self._number[sequence.block_table[-1]] if first else _ROOT
        matched: list[int] = []
        for start in range(first * size, (sequence.n_tokens - 1) // size * size, size):
            block = self._by_content.get((parent, tuple(sequence.tokens[start : start + size])))
            if block is None:
                break
            matched.append(block)
            parent = self._number[block]
        return matched

    def _evict(self) -> int:
        block, _ = self._cached.popitem(last=False)
        content = self._content[block]
        assert content is not None
        del self._by_content[content]
        self._content[block] = None
        self._number[block] = _ROOT
        return block
