// Package loader reads safetensors files, and trusts nothing in them.
//
// A weights file comes from a stranger, over a network, onto a disk that may have been full. What is in it decides how much
// memory is taken and where bytes go. So the whole of it is checked before the first byte of a tensor is read: [Open] reads the
// header of every file of a model with a strict scanner, accounts for every byte of every file, and returns a [Set], or an
// error that says which files are bad, in what way, by how many bytes, and (see [Hint]) what to do about it. Then
// [Set.ReadAt] reads one tensor or a part of it.
//
//	set, err := loader.Open("models/llama")    // a folder, or one file
//	t, ok := set.Tensor("model.norm.weight")   // name, type, shape
//	err = set.ReadAt(t, buffer[:t.Bytes], 0)
//
// Where a model has an index, that is an allow-list: a file is read only if it is listed, and a tensor is taken only from
// the file it is listed for. What else is in the files is counted in [File.Ignored]. A tensor that the model does without,
// like an output head that is tied to the embedding, is simply not there; nothing is invented.
//
// # Loading inside a budget
//
// A load is planned before its first byte is read, and then carried out exactly so.
//
//	copier := loader.Probe(set, threads)                                   // how to read: what is fastest for these files
//	stats := loader.StatsOf(set, loader.StatsOptions{})                    // what to load: here everything, and everything stays
//	plan, err := loader.Fit(stats, loader.PlanParams{Budget: budget, Group: 1, AccumulateResident: true,
//		Align: device.PageSize, Copier: copier.Costs(set.Files)})      // in which chunks, how many at once
//	tensors, report, err := set.Execute(ctx, plan, loader.LoadOptions{Device: dev, Copier: copier, Threads: threads})
//	m, ok := tensors.Mem(t)
//
// [Fit] is pure and says in its error which tensor binds, how many bytes are missing and what would do ([BudgetInfeasibleError]). A
// [Copier] declares what it costs; one that does not cannot be planned. [Set.Execute] takes the memory of every chunk from the
// device before it reads, so the device's ledger shows what the plan predicted; the report has both. Tensors that somebody else has a
// place for, as a model that packs its weights, are delivered in pieces instead ([LoadOptions.Deliver]).
//
// The budget is the caller's. Where nobody has stated one, [SuggestBudget] says what is free less a twentieth of it, at least a
// GiB, and the least of that over all ranks; [FitSuggested] then warns where a stated budget would be refused.
//
// Ranks that load together pass a [collective.World]: each for itself, or, with as large a Group in the plan, each byte read by one and sent
// to all. Their plans' digests are compared before anything is read, and what fails on one rank fails on all.
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
// to be used before it has returned without an error. Reads go through the page cache, but for those of the copier direct. A
// mapping (the copier mmap) is the page cache itself: its bytes count against no budget, also where a memory cgroup counts them.
//
// A plan made for the classic mode counts bytes, as the planner that it follows, while a device counts pages: the device then needs up to a page
// more for each chunk and each tensor than the plan says.
//
// The format is described at https://github.com/huggingface/safetensors.
package loader
