"""KV blocks: equal prefixes are shared, unequal ones never, and no block is ever lost."""

from __future__ import annotations

import random

import pytest

from hotneuron.actors.kv_blocks import KVBlocks
from hotneuron.actors.messages import Request
from hotneuron.actors.sequence import Sequence
from hotneuron.models.errors import RequestError


def sequence_of(tokens) -> Sequence:
    return Sequence(Request("r", tuple(tokens), 1), order=0, limit_tokens=1 << 20, submitted_s=0.0)


def computed(kv: KVBlocks, tokens, n_computed: int | None = None) -> Sequence:
    """A sequence that went through the prompt: blocks taken, rows computed and offered."""
    sequence = sequence_of(tokens)
    kv.allocate(sequence)
    assert kv.extend(sequence, sequence.n_tokens)
    sequence.n_computed_tokens = sequence.n_tokens if n_computed is None else n_computed
    kv.mark_computed(sequence)
    return sequence


class TestSharing:
    @pytest.mark.parametrize("size", [1, 3, 16])
    @pytest.mark.parametrize("n_common", range(0, 70, 7))
    def test_shares_the_common_full_blocks_and_nothing_more(self, size, n_common):
        """A new sequence gets exactly the full blocks of the longest common prefix."""
        kv = KVBlocks(200, size)
        first = computed(kv, range(70))
        second = sequence_of([*range(n_common), *range(1000, 1050)])
        n_cached = kv.allocate(second)
        assert n_cached == second.n_computed_tokens == n_common // size * size
        assert second.block_table == first.block_table[: n_common // size]
        kv.check_integrity([first, second])

    @pytest.mark.parametrize("n_tokens", [1, 15, 16, 17, 31, 32, 33])
    def test_last_prompt_token_is_always_computed(self, n_tokens):
        """The same prompt again reuses all full blocks before its last token, and at least that one is fed."""
        kv = KVBlocks(8)
        kv.release(computed(kv, range(n_tokens)))
        again = sequence_of(range(n_tokens))
        assert kv.allocate(again) == (n_tokens - 1) // 16 * 16 < n_tokens

    def test_uncomputed_blocks_are_not_shared(self):
        """Rows that are only allocated, or only partly computed, are invisible to others."""
        kv = KVBlocks(16)
        first = computed(kv, range(64), n_computed=31)
        assert kv.allocate(sequence_of(range(64))) == 16
        first.n_computed_tokens = 32
        kv.mark_computed(first)
        assert kv.allocate(sequence_of(range(64))) == 32

    def test_shares_in_the_middle_of_a_prompt(self):
        """A sequence that started first can take over what another has computed further on."""
        kv = KVBlocks(16)
        slow = computed(kv, range(64), n_computed=0)
        kv.release(slow)
        assert kv.extend(slow, 16)
        slow.n_computed_tokens = 16
        kv.mark_computed(slow)
        fast = computed(kv, range(64))
        assert kv.allocate(slow) == 32  # not the last block: it has the last token
        assert slow.block_table == fast.block_table[:3]
        kv.check_integrity([slow, fast])

    def test_twins_computed_side_by_side_keep_their_own_blocks(self):
        """Equal blocks computed at the same time stay apart, and the second one's is free after release."""
        kv = KVBlocks(8)
        one, two = sequence_of(range(40)), sequence_of(range(40))
        for twin in (one, two):
            assert kv.allocate(twin) == 0 and kv.extend(twin, 40)
        for twin in (one, two):
            twin.n_computed_tokens = 40
            kv.mark_computed(twin)
        assert not set(one.block_table) & set(two.block_table)
        kv.check_integrity([one, two])
        kv.release(two)
        three = sequence_of(range(40))
        assert kv.allocate(three) == 32 and three.block_table == one.block_table[:2]
        kv.check_integrity([one, three])


class TestNeverWrong:
    def test_equal_hashes_with_other_tokens_are_not_shared(self):
        """Python hashes n and n + 2**61 - 1 alike; blocks of such tokens must still be told apart."""
        low, high = range(16), [token + 2**61 - 1 for token in range(16)]
        assert hash(tuple(low)) == hash(tuple(high))
        kv = KVBlocks(8)
        computed(kv, low)
        assert kv.allocate(sequence_of([*high, 5])) == 0
        assert kv.allocate(sequence_of([*low, 5])) == 16

    def test_equal_tokens_after_another_prefix_are_not_shared(self):
        """A block's rows depend on everything before it, so its own tokens are not enough."""
        kv = KVBlocks(8)
        computed(kv, [*range(16), *range(100, 116)])
        other = sequence_of([*range(50, 66), *range(100, 116), 1])
        assert kv.allocate(other) == 0
        shifted = sequence_of([*range(100, 116), 1])
        assert kv.allocate(shifted) == 0

    def test_rows_not_computed_yet_are_no_prefix(self):
        """Behind a block that is only allocated nothing is matched, least of all what starts another prompt."""
        kv = KVBlocks(8)
        computed(kv, range(16))
        sequence = sequence_of([*range(50, 66), *range(16), 1])
        assert kv.extend(sequence, 16)
        assert kv.allocate(sequence) == 0 and len(sequence.block_table) == 1

    def test_orphan_of_an_evicted_prefix_is_not_taken(self):
        """After a prefix is evicted, a block that hung on it is out of reach, even once its place is used anew."""
        kv = KVBlocks(4, 4)
        sequence = computed(kv, range(8))
        root, _ = sequence.block_table
        kv.release(sequence)
        kv._cached.move_to_end(root, last=False)  # as if it had been released before its child
        filler = computed(kv, range(50, 62))
        assert root in filler.block_table
        kv.check_integrity([filler])
        assert kv.allocate(sequence_of([*range(8), 9])) == 0
        assert kv.allocate(sequence_of([*range(50, 54), *range(4, 8), 9])) == 4

    def test_forget_all_empties_the_cache(self):
        """Nothing computed before a loss is ever shared again, and all blocks are there."""
        kv = KVBlocks(8)
        kv.release(computed(kv, range(100)))
        kv.forget_all()
        kv.check_integrity()
        assert kv.allocate(sequence_of(range(100))) == 0
        assert kv.n_available_blocks == 8

    def test_forget_all_refuses_while_blocks_are_held(self):
        """A holder would go on with rows that are gone."""
        kv = KVBlocks(8)
        computed(kv, range(3))
        with pytest.raises(AssertionError, match="hold"):
            kv.forget_all()


class TestRoom:
    def test_extend_is_all_or_nothing(self):
        """A sequence that asks for too much gets nothing and keeps what it has."""
        kv = KVBlocks(4)
        sequence = sequence_of(range(16))
        assert kv.extend(sequence, 33)
        table = list(sequence.block_table)
        assert len(table) == 3
        assert not kv.extend(sequence, 65) and sequence.block_table == table
        assert kv.extend(sequence, 64) and sequence.block_table[:3] == table
        kv.check_integrity([sequence])

    def test_cached_blocks_are_evicted_oldest_release_first(self):
        """The cache never stands in the way of memory; what was released first goes first, leaves before roots."""
        kv = KVBlocks(6)
        old, new = computed(kv, range(48)), computed(kv, range(100, 148))
        kv.release(old)
        kv.release(new)
        taker = sequence_of([7])
        assert kv.extend(taker, 2 * 16)
        assert kv.allocate(sequence_of(range(48))) == 16
        assert kv.allocate(sequence_of([*range(100, 148), 1])) == 48

    @pytest.mark.parametrize("n_reserved", range(5))
    def test_can_allocate_tells_the_truth(self, n_reserved):
        """It says yes exactly when allocating and extending then leaves the reserve untouched."""
        for n_held in range(0, 60, 5):
            for n_new in range(1, 100, 9):
                kv = KVBlocks(6)
                if n_held:
                    holder = computed(kv, range(n_held))
                    if n_held % 2:
                        kv.release(holder)
                sequence = sequence_of(range(n_new))
                said = kv.can_allocate(sequence, n_reserved)
                kv.allocate(sequence)
                assert said == (kv.extend(sequence, n_new) and kv.n_available_blocks >= n_reserved)

    @pytest.mark.parametrize("sizes", [(0, 16), (4, 0), (-1, 16)])
    def test_refuses_senseless_sizes(self, sizes):
        with pytest.raises(RequestError, match="at least one"):
            KVBlocks(*sizes)


class TestIntegrity:
    @pytest.mark.parametrize("seed", range(5))
    def test_random_use_leaks_nothing(self, seed):
        """2,000 random steps of growing, computing and releasing; then every block can be had again."""
        dice = random.Random(seed)
        kv = KVBlocks(dice.choice([3, 7, 20]), dice.choice([1, 2, 5]))
        alive: list[Sequence] = []
        for _ in range(2000):
            if dice.random() < 0.4 or not alive:
                sequence = sequence_of(dice.choices(range(2), k=dice.randint(1, 12)))
                kv.allocate(sequence)
                alive.append(sequence)
            sequence = dice.choice(alive)
            if dice.random() < 0.6:
                if kv.extend(sequence, min(sequence.n_tokens, sequence.n_computed_tokens + dice.randint(0, 4))):
                    room = len(sequence.block_table) * kv.block_tokens
                    sequence.n_computed_tokens = min(room, sequence.n_tokens)
                    kv.mark_computed(sequence)
            else:
                kv.release(sequence)
                alive.remove(sequence)
            kv.check_integrity(alive)
        for sequence in alive:
            kv.release(sequence)
        kv.check_integrity()
        assert kv.n_available_blocks == kv.n_blocks and kv.n_hit_blocks > 0
        assert kv.extend(sequence_of([1]), kv.n_tokens)

    @pytest.mark.parametrize("damage", ["leak", "double", "miscount", "foreign"])
    def test_check_integrity_sees_damage(self, damage):
        """Each kind of damage is noticed."""
        kv = KVBlocks(8)
        sequence = computed(kv, range(40))
        kv.check_integrity([sequence])
        if damage == "leak":
            kv._free.pop()
        elif damage == "double":
            kv._free.append(sequence.block_table[0])
        elif damage == "miscount":
            kv._n_holders[sequence.block_table[0]] += 1
        else:
            kv._content[sequence.block_table[0]] = None
        with pytest.raises(AssertionError):
            kv.check_integrity([sequence])

    def test_release_twice_is_harmless_and_release_of_stolen_blocks_is_noticed(self):
        """The table is emptied by the first release; a forged table trips the count."""
        kv = KVBlocks(4)
        sequence = computed(kv, range(20))
        forged = list(sequence.block_table)
        kv.release(sequence)
        kv.release(sequence)
        kv.check_integrity()
        sequence.block_table += forged
        with pytest.raises(AssertionError, match="released more often"):
            kv.release(sequence)
