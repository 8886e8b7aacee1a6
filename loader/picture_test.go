package loader_test

import (
	"bytes"
	"flag"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/trainerrank/engine/device"
	"github.com/trainerrank/engine/loader"
)

var updatePicture = flag.Bool("update-picture", false, "rewrite docs/loader.svg")

// The worked example of docs/loader.md: load --budget 672KiB --max-chunk 64KiB, in both modes.
const (
	pictureModel  = "../internal/builtin/arith"
	pictureBudget = 672 << 10
	pictureChunk  = 64 << 10
	pictureFile   = "../docs/loader.svg"
	pictureText   = "../docs/loader.md"
)

// TestPictureIsThatOfThePlan draws docs/loader.svg anew, from plans that are carried out as well: their observed peak is that of the
// picture. The text beside it quotes the plan.
func TestPictureIsThatOfThePlan(t *testing.T) {
	text, err := os.ReadFile(pictureText)
	if err != nil {
		t.Fatal(err)
	}
	var runs []pictured
	for _, classic := range []bool{false, true} {
		r := picture(t, classic)
		if r.peak() != r.plan.Peak || r.plan.Peak != r.report.Peak {
			t.Errorf("classic %v: the picture's peak is %d, predicted are %d, observed %d", classic, r.peak(), r.plan.Peak, r.report.Peak)
		}
		if r.peak() > pictureBudget {
			t.Errorf("classic %v: peak %d, budget %d", classic, r.peak(), pictureBudget)
		}
		runs = append(runs, r)
	}
	var quoted strings.Builder
	for line := range strings.Lines(runs[0].plan.String()) {
		if line != "\n" {
			quoted.WriteString("    ")
		}
		quoted.WriteString(line)
	}
	if !strings.Contains(string(text), quoted.String()) {
		t.Errorf("%s does not quote this plan:\n%s", pictureText, runs[0].plan.String())
	}
	drawn := drawPicture(runs)
	if *updatePicture {
		if err := os.WriteFile(pictureFile, drawn, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	have, err := os.ReadFile(pictureFile)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(have, drawn) {
		t.Errorf("%s is not what is drawn; go test ./loader -run Picture -update-picture", pictureFile)
	}
}

// pictured is a load as a course of moments.
type pictured struct {
	title   string
	plan    *loader.FitPlan
	report  *loader.LoadReport
	moments []moment
	total   int64
}

// moment is what is in use from when so many bytes have been delivered.
type moment struct{ delivered, resident, inFlight int64 }

func (p *pictured) peak() (most int64) {
	for _, m := range p.moments {
		most = max(most, m.resident+m.inFlight)
	}
	return most
}

// picture plans a load, carries it out, and replays the plan by what PlanParams says of how memory is charged.
func picture(t *testing.T, classic bool) pictured {
	t.Helper()
	set, err := loader.OpenFS(os.DirFS(pictureModel), "builtin:arith")
	if err != nil {
		t.Fatal(err)
	}
	defer set.Close()
	copier, err := loader.NewCopier(loader.CopierPread, 2)
	if err != nil {
		t.Fatal(err)
	}
	stats := loader.StatsOf(set, loader.StatsOptions{Atom: func(*loader.Tensor) int64 { return device.PageSize }})
	plan, err := loader.Fit(stats, loader.PlanParams{
		Budget: pictureBudget, MaxChunk: pictureChunk, AccumulateResident: true, Group: 1, Align: device.PageSize,
		Copier: copier.Costs(set.Files), Classic: classic,
	})
	if err != nil {
		t.Fatal(err)
	}
	dev, err := device.NewHost(2 * pictureBudget) // the classic mode counts no pages
	if err != nil {
		t.Fatal(err)
	}
	tensors, report, err := set.Execute(t.Context(), plan, loader.LoadOptions{Device: dev, Copier: copier, Threads: 2})
	if err != nil {
		t.Fatal(err)
	}
	tensors.Free()
	p := pictured{title: "Default mode", plan: plan, report: report}
	align := int64(device.PageSize)
	if classic {
		p.title, align = "Classic mode", 1
	}
	p.replay(align)
	p.title += fmt.Sprintf(": %d chunks, peak %d bytes", report.Chunks, plan.Peak)
	return p
}

func (p *pictured) replay(align int64) {
	round := func(n int64) int64 { return (n + align - 1) / align * align }
	type placed struct {
		*loader.Chunk
		file *loader.FilePlan
	}
	var queue []placed
	for b := range p.plan.Batches() {
		queue = append(queue, placed{b.Chunks[0], &p.plan.Files[b.First]})
	}
	var now moment
	note := func() { p.moments = append(p.moments, now) }
	begun := 0
	for i, c := range queue {
		for ; begun < len(queue) && begun-i < p.plan.Depth; begun++ {
			now.inFlight += round(queue[begun].Bytes)
		}
		note()
		for part := range c.file.Parts(c.Chunk) {
			if !c.HandOver && part.Offset == 0 {
				now.resident += round(c.file.Tensors[part.Tensor].Bytes)
				note()
			}
			now.delivered += part.Bytes
		}
		if c.HandOver {
			now.resident += round(c.Bytes)
		}
		now.inFlight -= round(c.Bytes)
		note()
	}
	p.total = now.delivered
}

// drawPicture draws one panel for each load, one below the other, over the bytes delivered so far.
func drawPicture(runs []pictured) []byte {
	const (
		width, left, right  = 880, 84, 24
		top, height, gap    = 76, 230, 84
		resident, inFlight  = "#4a7fb5", "#f2a541"
		budgetLine, inkDark = "#b3261e", "#222222"
		most                = 720 << 10
	)
	var b bytes.Buffer
	out := func(format string, args ...any) { fmt.Fprintf(&b, format+"\n", args...) }
	bottom := top + len(runs)*(height+gap) - gap + 56
	out(`<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" width="%d" height="%d" font-family="sans-serif" font-size="13" fill="%s">`,
		width, bottom, width, bottom, inkDark)
	out(`<title>Bytes in use during a load inside a budget of 672 KiB, in two modes</title>`)
	out(`<rect width="%d" height="%d" fill="#ffffff"/>`, width, bottom)
	at := left
	for _, k := range []struct {
		name, color string
		wide        int
	}{{"resident: tensors with their final memory", resident, 320}, {"in flight: chunks being read, waiting or being delivered", inFlight, 0}} {
		out(`<rect x="%d" y="14" width="14" height="14" fill="%s"/>`, at, k.color)
		out(`<text x="%d" y="26">%s</text>`, at+20, k.name)
		at += k.wide
	}
	out(`<path d="M%d 43h22" stroke="%s" stroke-width="2"/>`, left, budgetLine)
	out(`<text x="%d" y="47">budget: 688128 bytes (672 KiB)</text>`, left+28)
	out(`<path d="M%d 43h22" stroke="%s" stroke-width="1.5" stroke-dasharray="5 3"/>`, left+320, inkDark)
	out(`<text x="%d" y="47">peak, predicted and observed</text>`, left+348)
	for i := range runs {
		r := &runs[i]
		y0 := top + i*(height+gap) + height
		x := func(bytes int64) float64 { return left + float64(bytes)/float64(r.total)*(width-left-right) }
		y := func(bytes int64) float64 { return float64(y0) - float64(bytes)/most*height }
		out(`<text x="%d" y="%d" font-weight="bold">%s</text>`, left, y0-height-6, r.title)
		for kib := int64(0); kib <= 700; kib += 100 {
			out(`<path d="M%d %.1fH%d" stroke="#dddddd"/>`, left, y(kib<<10), width-right)
			out(`<text x="%d" y="%.1f" text-anchor="end">%d</text>`, left-8, y(kib<<10)+4, kib)
		}
		// Both areas are drawn as stairs: what is in use from one moment to the next. The taller lies below.
		area := func(color string, of func(moment) int64) {
			out(`<path fill="%s" d="M%d %d`, color, left, y0)
			for k, m := range r.moments {
				end := r.total
				if k+1 < len(r.moments) {
					end = r.moments[k+1].delivered
				}
				out(`L%.1f %.1fH%.1f`, x(m.delivered), y(of(m)), x(end))
			}
			out(`V%dZ"/>`, y0)
		}
		area(inFlight, func(m moment) int64 { return m.resident + m.inFlight })
		area(resident, func(m moment) int64 { return m.resident })
		out(`<path d="M%d %.1fH%d" stroke="%s" stroke-width="2"/>`, left, y(r.plan.Budget), width-right, budgetLine)
		out(`<path d="M%d %.1fH%d" stroke="%s" stroke-width="1.5" stroke-dasharray="5 3"/>`, left, y(r.plan.Peak), width-right, inkDark)
		out(`<path d="M%d %dV%dH%d" fill="none" stroke="%s"/>`, left, y0-height, y0, width-right, inkDark)
		for kib := int64(0); kib<<10 <= r.total; kib += 100 {
			out(`<path d="M%.1f %dv5" stroke="%s"/>`, x(kib<<10), y0, inkDark)
			out(`<text x="%.1f" y="%d" text-anchor="middle">%d</text>`, x(kib<<10), y0+19, kib)
		}
		out(`<text x="%d" y="%d" text-anchor="middle">time, as bytes of tensors delivered so far (KiB)</text>`, (left+width-right)/2, y0+40)
		out(`<text transform="translate(28 %d) rotate(-90)" text-anchor="middle">bytes in use (KiB)</text>`, y0-height/2)
	}
	out(`</svg>`)
	return b.Bytes()
}
