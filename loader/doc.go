// Package loader reads safetensors files, and trusts nothing in them.
//
// A weights file comes from a stranger, over a network, onto a disk that may have been full. What is in it decides how much
// memory is taken and where bytes go. So the whole of it is checked before the first byte of a tensor is read: [Open] reads the
// header of every file of a model with a strict scanner, accounts for every byte of every file, and returns a [Set], or an
// error that says which files are bad, in what way, by how many bytes, and (see [Hint]) what to do about it. Then
// [Set.ReadAt] reads one tensor or a part of it, and [Set.Load] reads many, in parallel and in large pieces, to where the
// caller wants them.
//
//	set, err := loader.Open("models/llama")    // a folder, or one file
//	t, ok := set.Tensor("model.norm.weight")   // name, type, shape
//	err = set.ReadAt(t, buffer[:t.Bytes], 0)
//
// Where a model has an index, that is an allow-list: a file is read only if it is listed, and a tensor is taken only from
// the file it is listed for. What else is in the files is counted in [File.Ignored]. A tensor that the model does without,
// like an output head that is tied to the embedding, is simply not there; nothing is invented.
//
// # Names and shapes
//
// Names are as they are in the header, unescaped, and compared byte by byte. A shape counts elements, also for types of less
// than a byte. Data may begin at any byte of a file, so nothing that is read may be assumed to be aligned there; what
// alignment it has in memory is the caller's choice of buffer.
//
// # Caveats
//
// A file that is written to while a model is loaded can only be noticed by its size, inode and time of change, so a load is not
// to be used before it has returned without an error. Reads go through the page cache.
//
// The format is described at https://github.com/huggingface/safetensors.
package loader
