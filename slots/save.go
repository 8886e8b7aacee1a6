package slots

import (
	"bufio"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/trainerrank/engine/device"
)

// Save writes a slot to a folder, as [Set.Prepare] and [Saving.Finish] do. All ranks call it.
func (s *Set) Save(ctx context.Context, name, dir string) error {
	p, err := s.Prepare(ctx, name, dir)
	if err != nil {
		return err
	}
	if err := p.Finish(ctx); err != nil {
		return errors.Join(err, p.Abort(ctx))
	}
	return nil
}

// Saving is a checkpoint that is written and not yet in its place.
type Saving struct {
	set  *Set
	name string
	dir  string
	temp string // "" on the ranks that do not write
	left []step // to finish, once that has begun
	done bool
}

// Prepare writes a slot, as it is now, beside the folder where it is to be, and sees it onto the disk. Rank 0 writes and the others wait; all ranks call it, and then Finish or Abort.
//
// What is written is a folder that PEFT reads, with the moments of AdamW, the slot's parameters and buffers, its revision and a digest of it all beside PEFT's files. Gradients are not
// saved. A folder that holds anything else than a checkpoint is not replaced, which is an [*AdapterError]. Whoever prepares a second save into the same folder ends the first.
func (s *Set) Prepare(ctx context.Context, name, dir string) (*Saving, error) {
	s.turn.Lock()
	defer s.turn.Unlock()
	sl, err := s.lookup(name)
	if err == nil && sl.adapter == nil {
		err = &SlotStateError{name, "the base model is not saved as a checkpoint"}
	}
	p := &Saving{set: s, name: name}
	if err == nil && s.world.Rank() == 0 {
		if p.dir, err = place(dir); err == nil {
			p.temp, err = s.write(ctx, sl, p.dir)
		}
	}
	same := ""
	if err == nil {
		same = fmt.Sprintf("%q revision=%d %s", name, sl.revision, sl.print(false))
	}
	if err := s.settle(ctx, "prepare", err, same); err != nil {
		p.remove()
		return nil, fmt.Errorf("save checkpoint %s: %w", quote(name), err)
	}
	return p, nil
}

// Finish puts the checkpoint in its place at once: whoever reads the folder, and whoever finds it after a crash, has the old one or the new one, whole. All ranks call it. After an error it
// may be tried again.
func (p *Saving) Finish(ctx context.Context) error {
	p.set.turn.Lock()
	defer p.set.turn.Unlock()
	if p.done {
		return fmt.Errorf("save checkpoint %s: it is finished or aborted already", quote(p.name))
	}
	if p.temp != "" && p.left == nil {
		p.left = replacement(p.temp, p.dir, canExchange)
	}
	var err error
	for len(p.left) > 0 && err == nil {
		if err = p.left[0].do(); err != nil {
			err = fmt.Errorf("%s: %w", p.left[0].what, err)
		} else {
			p.left = p.left[1:]
		}
	}
	if err := p.set.settle(ctx, "finish", err, p.name); err != nil {
		return fmt.Errorf("save checkpoint %s: %w", quote(p.name), err)
	}
	p.done = true
	return nil
}

// Abort removes what Prepare wrote. All ranks call it. After Finish, or again, it does nothing.
func (p *Saving) Abort(ctx context.Context) error {
	p.set.turn.Lock()
	defer p.set.turn.Unlock()
	if p.done {
		return nil
	}
	p.done = true
	p.remove()
	if err := p.set.settle(ctx, "abort", nil, p.name); err != nil {
		return fmt.Errorf("abort the save of checkpoint %s: %w", quote(p.name), err)
	}
	return nil
}

func (p *Saving) remove() {
	if p.temp != "" {
		discard(p.temp)
	}
}

// Beside a folder NAME stand, while it is saved, .NAME.saving-X with what is being written, and where folders cannot be exchanged in one step .NAME.previous with what is
// being replaced.
func savingPrefix(dir string) string {
	return filepath.Join(filepath.Dir(dir), "."+filepath.Base(dir)+".saving-")
}

func previous(dir string) string {
	return filepath.Join(filepath.Dir(dir), "."+filepath.Base(dir)+".previous")
}

// present is where a checkpoint is: in its folder, or, if whoever was replacing it was interrupted between two steps, beside it.
func present(dir string) string {
	if _, err := os.Lstat(dir); errors.Is(err, fs.ErrNotExist) {
		if abs, err := filepath.Abs(dir); err == nil {
			if old := previous(abs); isDir(old) {
				return old
			}
		}
	}
	return dir
}

func isDir(path string) bool {
	info, err := os.Stat(path)
	return err == nil && info.IsDir()
}

// place makes a folder ready to be saved into: its parent is there, what an earlier crash left is gone, and what it holds may be replaced.
func place(dir string) (string, error) {
	dir, err := filepath.Abs(dir)
	if err != nil {
		return "", err
	}
	if real, err := filepath.EvalSymlinks(dir); err == nil {
		dir = real
	} else if _, err := os.Lstat(dir); err == nil {
		return "", &AdapterError{Path: dir, Problem: "it is a link that leads nowhere"}
	}
	parent := filepath.Dir(dir)
	if parent == dir {
		return "", &AdapterError{Path: dir, Problem: "that is no folder for a checkpoint"}
	}
	if err := os.MkdirAll(parent, 0o777); err != nil {
		return "", err
	}
	entries, err := os.ReadDir(parent)
	if err != nil {
		return "", err
	}
	for _, e := range entries {
		if path := filepath.Join(parent, e.Name()); strings.HasPrefix(path, savingPrefix(dir)) {
			discard(path)
		}
	}
	if old := previous(dir); isDir(old) {
		if _, err := os.Lstat(dir); errors.Is(err, fs.ErrNotExist) {
			err := os.Rename(old, dir)
			if err != nil {
				return "", err
			}
		} else {
			discard(old)
		}
	}
	return dir, replaceable(dir)
}

// replaceable says why a folder may not be replaced.
func replaceable(dir string) error {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return &AdapterError{Path: dir, Problem: "a checkpoint cannot be saved there", Err: err}
	}
	for _, e := range entries {
		if !slices.Contains(fileNames, e.Name()) {
			return &AdapterError{Path: dir, Item: e.Name(), Problem: "a save would delete it, and it is no part of a checkpoint", Advice: "save into another folder"}
		}
	}
	return nil
}

// discard removes a checkpoint that is not wanted any more. Of anything else in its folder it removes nothing.
func discard(dir string) {
	for _, name := range fileNames {
		os.Remove(filepath.Join(dir, name))
	}
	os.Remove(dir)
}

// step is one operation of the file system; between two there may be a crash.
type step struct {
	what string
	do   func() error
}

// canExchange says whether to try to exchange two folders in one step. Tests turn it off.
var canExchange = true

// replacement are the steps that put a whole folder in the place of another, which may not be there.
func replacement(temp, dir string, canExchange bool) []step {
	parent, old := filepath.Dir(dir), previous(dir)
	sync := step{"sync " + parent, func() error { return syncDir(parent) }}
	if _, err := os.Lstat(dir); errors.Is(err, fs.ErrNotExist) {
		return []step{{"put the checkpoint in its place", func() error { return os.Rename(temp, dir) }}, sync}
	}
	exchanged := false
	return []step{
		{"check " + dir, func() error { return replaceable(dir) }},
		{"put the old checkpoint aside", func() error {
			if canExchange {
				err := exchange(temp, dir)
				if exchanged = err == nil; exchanged || !errors.Is(err, errors.ErrUnsupported) {
					return err
				}
			}
			return os.Rename(dir, old)
		}},
		{"put the new checkpoint in its place", func() error {
			if exchanged {
				return nil
			}
			err := os.Rename(temp, dir)
			if err != nil {
				return errors.Join(err, os.Rename(old, dir))
			}
			return nil
		}},
		sync,
		{"remove the old checkpoint", func() error {
			if exchanged {
				discard(temp)
			} else {
				discard(old)
			}
			return nil // what is left is removed by the next save
		}},
	}
}

// write writes a checkpoint into a new folder beside dir, and sees it onto the disk.
func (s *Set) write(ctx context.Context, sl *slot, dir string) (temp string, err error) {
	temp = savingPrefix(dir) + fmt.Sprintf("%016x", rand.Uint64())
	if err := os.Mkdir(temp, 0o777); err != nil {
		return "", err
	}
	defer func() {
		if err != nil {
			discard(temp)
		}
	}()
	m := &manifest{Format: formatVersion, BaseModel: sl.summary.BaseModel, Revision: sl.revision, Adam: sl.adam, Steps: map[string]int64{}, Owned: []ownedRecord{}, Files: map[string]fileRecord{}}
	weights, owned, moments := tensorsOf(sl.main, sl.main.params, ""), []written(nil), []written(nil)
	stepped := slices.ContainsFunc(sl.vectors(), func(v *vector) bool { return v.steps > 0 }) // else the moments are zero
	for _, v := range sl.vectors() {
		if v != sl.main {
			owned = append(owned, tensorsOf(v, v.params, "")...)
		}
		if stepped && v.trained() {
			m.Steps[v.name] = v.steps
			moments = append(moments, tensorsOf(v, v.mean, suffixMean)...)
			moments = append(moments, tensorsOf(v, v.sq, suffixSq)...)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(sl.owned)) {
		o := sl.owned[name]
		m.Owned = append(m.Owned, ownedRecord{name, o.buffer, o.v.tensors[0].Shape})
	}
	file := func(name string, write func(io.Writer) error) {
		if err == nil {
			m.Files[name], err = writeFile(filepath.Join(temp, name), write)
		}
	}
	plain := func(b []byte) func(io.Writer) error {
		return func(w io.Writer) error { _, err := w.Write(b); return err }
	}
	file(configName, plain(sl.config))
	file(weightsName, func(w io.Writer) error { return writeTensors(ctx, w, weights) })
	if owned != nil {
		file(ownedName, func(w io.Writer) error { return writeTensors(ctx, w, owned) })
	}
	if moments != nil {
		file(optimizerName, func(w io.Writer) error { return writeTensors(ctx, w, moments) })
	}
	if err == nil {
		_, err = writeFile(filepath.Join(temp, manifestName), plain(m.text()))
	}
	if err == nil {
		err = syncDir(temp)
	}
	return temp, err
}

// writeFile writes a new file, sees it onto the disk, and says what is in it.
func writeFile(path string, write func(io.Writer) error) (r fileRecord, err error) {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o666)
	if err != nil {
		return r, err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	h := sha256.New()
	b := bufio.NewWriterSize(io.MultiWriter(f, h), piece)
	if err := write(b); err != nil {
		return r, err
	}
	if err := b.Flush(); err != nil {
		return r, err
	}
	info, err := f.Stat()
	if err != nil {
		return r, err
	}
	return fileRecord{info.Size(), hex.EncodeToString(h.Sum(nil))}, f.Sync()
}

// written is a tensor on its way to a file.
type written struct {
	name string
	t    *Tensor
	mem  device.Mem // of the vector
}

func tensorsOf(v *vector, m device.Mem, suffix string) []written {
	var list []written
	for i := range v.tensors {
		t := &v.tensors[i]
		list = append(list, written{t.Name + suffix, t, m})
	}
	return list
}

// writeTensors writes a safetensors file of float32.
func writeTensors(ctx context.Context, w io.Writer, list []written) error {
	slices.SortFunc(list, func(a, b written) int { return strings.Compare(a.name, b.name) })
	type entry struct {
		DType   string   `json:"dtype"`
		Shape   []int64  `json:"shape"`
		Offsets [2]int64 `json:"data_offsets"`
	}
	header := []byte(`{"__metadata__":{"format":"pt","` + markKey + `":"` + manifestName + `"}`)
	at := int64(0)
	for _, x := range list {
		shape := x.t.Shape
		if shape == nil {
			shape = []int64{}
		}
		n := x.t.elements() * 4
		header = append(header, ',')
		header = append(header, encode(x.name)...)
		header = append(header, ':')
		header = append(header, encode(entry{"F32", shape, [2]int64{at, at + n}})...)
		at += n
	}
	header = append(header, '}')
	for len(header)%8 != 0 {
		header = append(header, ' ')
	}
	if err := binary.Write(w, binary.LittleEndian, uint64(len(header))); err != nil {
		return err
	}
	if _, err := w.Write(header); err != nil {
		return err
	}
	buf := make([]byte, 0, piece)
	flush := func() error {
		_, err := w.Write(buf)
		buf = buf[:0]
		return err
	}
	for _, x := range list {
		if err := ctx.Err(); err != nil {
			return err
		}
		values, rows, cols := x.t.in(x.mem), 1, int(x.t.elements())
		if x.t.Transposed {
			rows, cols = int(x.t.Shape[0]), int(x.t.Shape[1])
		}
		for i := range rows {
			for j := range cols {
				buf = binary.LittleEndian.AppendUint32(buf, math.Float32bits(values[j*rows+i]))
				if len(buf) == piece {
					if err := flush(); err != nil {
						return err
					}
				}
			}
		}
	}
	return flush()
}
