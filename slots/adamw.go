package slots

import (
	"fmt"
	"math"
)

// AdamParams are the settings of AdamW (Loshchilov and Hutter, 2019). They are taken as they are: a zero is a zero, and the zero value is refused. [Adam] has the usual ones.
type AdamParams struct {
	LearningRate float64 `json:"learning_rate"`
	Beta1        float64 `json:"beta1"` // how much of the first moment is kept at each step
	Beta2        float64 `json:"beta2"` // the same of the second
	Eps          float64 `json:"eps"`   // added to the root of the second moment, which may be 0; above 0
	WeightDecay  float64 `json:"weight_decay"`
	GradClipNorm float64 `json:"grad_clip_norm"` // gradients of a larger norm are scaled down to it; 0 or less: never
}

// Adam is the usual settings with a learning rate: betas 0.9 and 0.99, eps 1e-8, weight decay 0.1, gradients clipped at a norm of 0.1.
func Adam(learningRate float64) AdamParams {
	return AdamParams{LearningRate: learningRate, Beta1: 0.9, Beta2: 0.99, Eps: 1e-8, WeightDecay: 0.1, GradClipNorm: 0.1}
}

func (p AdamParams) check() error {
	for _, f := range []struct {
		name  string
		value float64
		below float64
	}{
		{"learning rate", p.LearningRate, math.Inf(1)}, {"beta1", p.Beta1, 1}, {"beta2", p.Beta2, 1},
		{"eps", p.Eps, math.Inf(1)}, {"weight decay", p.WeightDecay, math.Inf(1)},
	} {
		if !(f.value >= 0 && f.value < f.below) {
			return fmt.Errorf("a %s of %g is not at least 0 and below %g", f.name, f.value, f.below)
		}
	}
	if p.Eps == 0 {
		return fmt.Errorf("an eps of 0 divides 0 by 0 where a gradient is 0")
	}
	if math.IsNaN(p.GradClipNorm) || math.IsInf(p.GradClipNorm, 0) {
		return fmt.Errorf("gradients cannot be clipped at a norm of %g; 0 is never", p.GradClipNorm)
	}
	return nil
}

// adamw is one step of [AdamParams] at one number of steps, as PyTorch takes it: the weights decay, then move by the corrected moments.
type adamw struct {
	scale                   float64 // of the gradient, for clipping
	mean, sq                float64 // weights of the gradient in the moments
	keep                    float64 // of the second moment
	decay, rate, root2, eps float64
}

func (p AdamParams) at(step int64, clip float64) adamw {
	c1, c2 := 1-math.Pow(p.Beta1, float64(step)), 1-math.Pow(p.Beta2, float64(step))
	return adamw{scale: clip, mean: 1 - p.Beta1, sq: 1 - p.Beta2, keep: p.Beta2, decay: 1 - p.LearningRate*p.WeightDecay,
		rate: p.LearningRate / c1, root2: math.Sqrt(c2), eps: p.Eps}
}

// apply updates parameters and moments. Products are rounded before they are added, as the conversions demand, so that every processor computes the same bits.
func (a adamw) apply(params, grads, mean, sq []float32) {
	grads, mean, sq = grads[:len(params)], mean[:len(params)], sq[:len(params)]
	for i, w := range params {
		g := float64(grads[i]) * a.scale
		m := float64(mean[i])
		m += float64((g - m) * a.mean)
		v := float64(a.keep*float64(sq[i])) + float64(float64(a.sq*g)*g)
		mean[i], sq[i] = float32(m), float32(v)
		params[i] = float32(float64(float64(w)*a.decay) - float64(a.rate*m)/(math.Sqrt(v)/a.root2+a.eps))
	}
}

// squares is the sum of squares.
func squares(grads []float32) float64 {
	var s [4]float64
	for ; len(grads) >= 4; grads = grads[4:] {
		for j := range s {
			x := float64(grads[j])
			s[j] += float64(x * x)
		}
	}
	for _, g := range grads {
		x := float64(g)
		s[0] += float64(x * x)
	}
	return s[0] + s[1] + (s[2] + s[3])
}
