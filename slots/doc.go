// Package slots keeps named LoRA adapters beside a base model: their parameters, what trains them, who may change them when, and their files.
//
// A [Set] is the slots of one model. A slot is loaded from a folder in PEFT's format or made fresh; its parameters, gradient accumulators and moments
// of AdamW lie on the device, all in float32, taken as a whole when it is loaded.
//
//	set := slots.New(model.Modules(), dev, slots.Options{World: w})
//	err := set.Load(ctx, "policy", "adapters/policy", slots.LoadOptions{})
//	lease, err := set.Acquire("policy")          // while a graph of a pass on it is live
//	...                                          // forward with lease.Adapter(), backward
//	err = set.Accumulate("policy", gradient)     // what the backward gave
//	lease.Release()
//	report, err := set.Step(ctx, slots.StepOptions{Params: slots.Adam(1e-4)})
//
// # Ranks
//
// Each rank has a Set of its own, with the same slots. The methods that take a context are collective: all ranks call them in the same order, and each
// succeeds on all or fails on all, leaving every slot as it was. The parameters of a slot have the same bits on all ranks, since they start so (which is checked) and are changed only by
// steps, which add the ranks' gradients in the order of the ranks.
//
// # Files
//
// [Set.Save] writes a folder that PEFT reads, and beside PEFT's files what it takes to train on with the same bits: moments, registered parameters and buffers, the revision, and a digest of it all.
// Its folder has the old checkpoint or the new one at any moment, whole. Pending gradients are not saved.
//
// # Caveats
//
// A [Lease] protects a slot from being replaced or unloaded, not from a step, unless the step is told to mind: see [LiveGraphs].
//
// The device's memory must be addressable by the host.
package slots
