package device

import "sync/atomic"

// Block is memory for one purpose, held until [Block.Free]. Its methods may be called from several goroutines. The garbage
// collector does not free a block that is dropped: a Mem does not keep its block alive, so it could not know when.
type Block struct {
	space   *Space
	id      uint64
	purpose Purpose
	asked   int64
	bytes   int64
	mem     atomic.Pointer[Mem] // the whole mapping; nil once freed
}

// Mem is the memory, of exactly the size that was asked. It is empty once the block is freed.
func (b *Block) Mem() Mem {
	m := b.mem.Load()
	if m == nil {
		return Mem{}
	}
	return m.Slice(0, b.asked)
}

// Bytes is what the block costs the device, in bytes: the size that was asked, rounded up to [PageSize].
func (b *Block) Bytes() int64 { return b.bytes }

// Purpose is what the block was allocated for.
func (b *Block) Purpose() Purpose { return b.purpose }

// Free returns the memory to the operating system at once. Nobody may use the block's Mem any more. Freeing a block
// again, or a nil block, does nothing.
func (b *Block) Free() {
	if b == nil {
		return
	}
	m := b.mem.Swap(nil)
	if m == nil {
		return
	}
	if b.bytes > 0 {
		b.space.mapper.Unmap(*m)
	}
	b.space.giveBack(b.id, b.purpose, b.bytes, b.bytes)
	b.space.forget(b.id)
}
