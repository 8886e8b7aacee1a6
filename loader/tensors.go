package loader

import "github.com/trainerrank/engine/device"

// Tensors is the memory of the tensors that a load has left on a device.
type Tensors struct {
	mem    map[*Tensor]device.Mem
	blocks []*device.Block
}

// Mem is the memory of a tensor, of its size, and whether it has any. What shares a chunk lies dense: it is aligned to pages only where the
// plan gave it a chunk of its own.
func (t *Tensors) Mem(x *Tensor) (device.Mem, bool) {
	if t == nil {
		return device.Mem{}, false
	}
	m, ok := t.mem[x]
	return m, ok
}

// Len is how many tensors there are.
func (t *Tensors) Len() int {
	if t == nil {
		return 0
	}
	return len(t.mem)
}

// Free gives all memory back. Freeing again, or nothing, does nothing.
func (t *Tensors) Free() {
	if t == nil {
		return
	}
	for _, b := range t.blocks {
		b.Free()
	}
	t.blocks, t.mem = nil, nil
}

func (t *Tensors) adopt(b *device.Block) {
	if b != nil {
		t.blocks = append(t.blocks, b)
	}
}
