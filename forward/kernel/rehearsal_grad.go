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
func (Rehearsal) Outer(device.Mem, Mat, Mat, Mat) {}

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

// SumRows does nothing.
func (Rehearsal) SumRows(device.Mem, Mat) {}
