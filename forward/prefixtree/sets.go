package prefixtree

import (
	"math/bits"
	"slices"
)

// A set of decisions is one bit per decision, in words. Preorder makes all decisions below one a run of bits.

func has(set []uint64, i int) bool { return set[i>>6]>>(i&63)&1 != 0 }

func flip(set []uint64, i int) { set[i>>6] ^= 1 << (i & 63) }

// fill sets or clears the bits from lo to hi.
func fill(set []uint64, lo, hi int, on bool) {
	for lo < hi {
		n := min(64-lo&63, hi-lo)
		mask := ^uint64(0) >> (64 - n) << (lo & 63)
		if on {
			set[lo>>6] |= mask
		} else {
			set[lo>>6] &^= mask
		}
		lo += n
	}
}

// compareSets orders sets as the ascending lists of their decisions are ordered: at the smallest decision that only one set has, that set is
// the smaller, unless the other has nothing from there on and is a prefix of it.
func compareSets(a, b []uint64) int {
	for w := range a {
		x := a[w] ^ b[w]
		if x == 0 {
			continue
		}
		other, sign := b, -1
		if b[w]&(x&-x) != 0 {
			other, sign = a, 1
		}
		if other[w]&^((x&-x)-1) == 0 && !slices.ContainsFunc(other[w+1:], func(u uint64) bool { return u != 0 }) {
			return -sign
		}
		return sign
	}
	return 0
}

// members appends the segments of the decisions in a set.
func (s *shape) members(dst []int, set []uint64) []int {
	for w, u := range set {
		for ; u != 0; u &= u - 1 {
			dst = append(dst, s.segments[w<<6+bits.TrailingZeros64(u)])
		}
	}
	return dst
}

// sets remembers different sets, numbered in the order in which they came.
type sets struct {
	width int // words per set
	words []uint64
	n     int
	slots []int32 // open hash table of numbers, each plus one; its length is a power of two, and at most half of it is used
}

func newSets(decisions, expected int) *sets {
	s := &sets{width: (decisions + 63) / 64}
	s.words = make([]uint64, 0, s.width*expected)
	s.slots = make([]int32, 2<<bits.Len(uint(expected)))
	return s
}

// at is a set by its number. It must not be changed, and it is valid until the next add.
func (s *sets) at(i int) []uint64 { return s.words[i*s.width:][:s.width:s.width] }

// add gives the number of a set, and says whether it is new.
func (s *sets) add(set []uint64) (number int, isNew bool) {
	if 2*(s.n+1) > len(s.slots) {
		s.slots = make([]int32, 2*len(s.slots))
		for i := range s.n {
			s.slots[s.find(s.at(i))] = int32(i + 1)
		}
	}
	slot := s.find(set)
	if x := s.slots[slot]; x > 0 {
		return int(x - 1), false
	}
	s.words = append(s.words, set...)
	s.n++
	s.slots[slot] = int32(s.n)
	return s.n - 1, true
}

// find is the slot that holds a set or would.
func (s *sets) find(set []uint64) int {
	h := uint64(0)
	for _, w := range set {
		hi, lo := bits.Mul64(h^w^0x9e3779b97f4a7c15, 0xd6e8feb86659fd93) // odd constants without pattern
		h = hi ^ lo
	}
	mask := len(s.slots) - 1
	for slot := int(h>>1) & mask; ; slot = (slot + 1) & mask {
		if x := s.slots[slot]; x == 0 || slices.Equal(s.at(int(x-1)), set) {
			return slot
		}
	}
}
