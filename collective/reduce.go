package collective

// number is what can be reduced.
type number interface{ int64 | float32 }

// reducePiece leaves op over the t-th pieces of all ranks in each of them. Rank 0's piece is the accumulator, so that no
// scratch is needed, and the others follow in their order.
func reducePiece[T number](ranks []member, op Op, t, size int, of func(*bring) []T) {
	acc := piece(of(&ranks[0].bring), t, size)
	for i := range ranks[1:] {
		combine(op, acc, piece(of(&ranks[1+i].bring), t, size))
	}
	for i := range ranks[1:] {
		copy(piece(of(&ranks[1+i].bring), t, size), acc)
	}
}

// piece is the t-th piece of v when v is cut into pieces of size.
func piece[T any](v []T, t, size int) []T { return v[t*size : min(len(v), (t+1)*size)] }

// combine is acc[i] = op(acc[i], v[i]); the lengths are equal.
func combine[T number](op Op, acc, v []T) {
	v = v[:len(acc)] // proves the bound once, outside the loop
	switch op {
	case Max:
		for i, x := range v {
			acc[i] = max(acc[i], x)
		}
	case Min:
		for i, x := range v {
			acc[i] = min(acc[i], x)
		}
	case Sum:
		for i, x := range v {
			acc[i] += x
		}
	}
}
