package kernel

import "github.com/trainerrank/engine/device"

var _ Backend = Rehearsal(0)

// Pack does nothing.
func (Rehearsal) Pack(*Weight, device.Mem, bool) {}

// Scale does nothing.
func (Rehearsal) Scale(Mat, float32) {}

// Activate does nothing.
func (Rehearsal) Activate(Mat, Mat, Mat, Activation) {}

// LinearGrad does nothing.
func (Rehearsal) LinearGrad(device.Mem, Mat, Mat, *Weight, bool) {}

// Outer does nothing.
func (Rehearsal) Outer(device.Mem, Mat, Mat, Mat, bool) {}

// NormGrad does nothing.
func (Rehearsal) NormGrad(Mat, Mat, Mat, device.Mem, float32, float64) {}

// NormWeightGrad does nothing.
func (Rehearsal) NormWeightGrad(device.Mem, Mat, Mat, float64) {}

// ActivateGrad does nothing.
func (Rehearsal) ActivateGrad(Mat, Mat, Mat, Mat, Mat, Mat, Activation) {}

// RowDot does nothing.
func (Rehearsal) RowDot(Mat, Mat, Mat, int) {}

// AttendQueryGrad does nothing.
func (Rehearsal) AttendQueryGrad(device.Mem, Mat, Mat, Mat, Mat, Mat, Mat, Mat, int, []Span, Attention) {
}

// AttendKeyGrad does nothing.
func (Rehearsal) AttendKeyGrad(device.Mem, Mat, Mat, Mat, Mat, Mat, Mat, Mat, Mat, int, []Span, Attention) {
}

// HeadGrad does nothing.
func (Rehearsal) HeadGrad(device.Mem, device.Mem, Mat, Mat, *Weight, []float64, []AskGrad) {}

// HeadWeightGrad does nothing.
func (Rehearsal) HeadWeightGrad(device.Mem, device.Mem, *Weight, int, Mat, *Weight, []float64, []AskGrad, bool) {
}

// EmbedGrad does nothing.
func (Rehearsal) EmbedGrad(*Weight, Mat, []int32, float32, int, int) {}

// Clear does nothing.
func (Rehearsal) Clear(Mat) {}

// Copy does nothing.
func (Rehearsal) Copy(Mat, Mat) {}

// PlaceRows does nothing.
func (Rehearsal) PlaceRows(Mat, Mat, []int32) {}

// AddRow does nothing.
func (Rehearsal) AddRow(Mat, int, []float32) {}

// SumRows does nothing.
func (Rehearsal) SumRows(device.Mem, Mat) {}
