package main

import (
	"bytes"
	"fmt"
	"html/template"
	"math"
	"os"
	"path/filepath"
	"strings"

	"github.com/trainerrank/engine/device"
)

// colours are those of the purposes, in their order. They differ in lightness too.
var colours = [device.NumPurposes]string{
	device.Weights: "#8a94a6", device.Adapters: "#b07aa1", device.InFlight: "#e0a030", device.Outputs: "#2f6db3",
	device.Retained: "#3d9a50", device.Scratch: "#9ecae9", device.Gradients: "#d1605e", device.Ballast: "#5b4a3f",
}

// The sizes of a panel, in pixels of the page, and how many are side by side.
const (
	panelWidth, panelHeight = 356, 272
	plotLeft, plotTop       = 58, 62
	plotWidth, plotHeight   = 262, 132
	planLeft, planWidth     = 332, 12 // of the planned peak, beside the plot
	across                  = 3
)

var page = template.Must(template.New("page").Funcs(template.FuncMap{"draw": drawArm, "bytes": showBytes}).Parse(`<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Acceptance</title>
<style>
body { font: 14px/1.45 system-ui, sans-serif; color: #1c2430; background: #fff; max-width: 1100px; margin: 24px auto; padding: 0 16px; }
h1 { font-size: 24px; margin: 0 0 4px; } h2 { font-size: 17px; margin: 32px 0 6px; }
table { border-collapse: collapse; width: 100%; } th, td { text-align: left; padding: 3px 10px 3px 0; border-bottom: 1px solid #e3e7ee; vertical-align: top; }
td.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; } th.n { text-align: right; }
tr.first td { border-top: 2px solid #aab3c2; } .arm { font-weight: 600; }
.holds { color: #1b7a33; } .fails { color: #fff; background: #b3261e; padding: 0 6px; border-radius: 3px; }
.why { color: #b3261e; } p.note { margin: 4px 0; color: #4a5568; overflow-wrap: anywhere; }
.legend span { display: inline-block; margin-right: 16px; white-space: nowrap; } .legend i { display: inline-block; width: 14px; height: 12px; margin-right: 5px; vertical-align: -1px; }
svg { max-width: 100%; height: auto; } svg text { font: 11px system-ui, sans-serif; fill: #1c2430; } svg .t { font-weight: 600; font-size: 12px; } svg .s { fill: #4a5568; font-size: 10.5px; }
</style>
</head>
<body>
<h1>Acceptance: {{if .Holds}}<span class="holds">every gate holds</span>{{else}}<span class="fails">{{.Failed}} of {{len .Verdicts}} gates fail</span>{{end}}</h1>
<p class="note">{{len .Verdicts}} gates of {{len .Results}} arms, each arm in a process of its own. Model {{.Config.Model}}, {{.Config.Requests}} requests of {{.Config.Tokens}} tokens, {{.Config.Threads}} threads{{if .Config.Short}}, short{{end}}.</p>
<table>
<tr><th>arm</th><th>gate</th><th class="n">bound</th><th class="n">observed</th><th>verdict</th></tr>
{{range .Rows}}<tr{{if .First}} class="first"{{end}}><td class="arm">{{if .First}}{{.Arm}}{{end}}</td><td>{{.Name}}{{if and (not .Holds) .Why}}<div class="why">{{.Why}}</div>{{end}}</td><td class="n">{{.Op}} {{bytes .Bound}}</td><td class="n">{{bytes .Observed}}</td><td><span class="{{if .Holds}}holds{{else}}fails{{end}}">{{if .Holds}}holds{{else}}FAILS{{end}}</span></td></tr>
{{end}}</table>
<h2>Bytes over time</h2>
<p class="note">A picture for each call: the bytes that it had in use beside those that were held before it (which are named below the picture, and shown there as a strip of all memory), stacked by what they are for, over milliseconds since the call began; the time before the first byte is taken is planning. What was admitted, the predicted peak, is drawn solid; what was usable is dashed. Of a refused call the solid line is what the plan would have needed. The bar beside a picture is the predicted peak by what it is for. Of a call with gradients the picture goes on through its backward, which begins at the dotted line; scratch is then the backward's intermediates and its gradient, both of which the plan has as scratch.</p>
<p class="legend">{{range .Legend}}<span><i style="background:{{.Colour}}"></i>{{.Name}}</span>{{end}}<span><svg width="26" height="10"><line x1="0" y1="5" x2="26" y2="5" stroke="#111" stroke-width="2"/></svg> admitted</span><span><svg width="26" height="10"><line x1="0" y1="5" x2="26" y2="5" stroke="#b3261e" stroke-width="2" stroke-dasharray="5 3"/></svg> usable</span></p>
{{range .Results}}<h2>{{.Arm}}</h2>
{{range .Notes}}<p class="note">{{.}}</p>
{{end}}{{draw .}}
{{end}}</body>
</html>
`))

// row is a line of the table.
type row struct {
	Verdict
	First bool // of its arm
}

type legend struct {
	Name   string
	Colour template.CSS
}

// writeReport writes the page: whole or not at all.
func writeReport(path string, c *config, results []*Result, verdicts []Verdict) error {
	data, err := render(c, results, verdicts)
	if err != nil {
		return err
	}
	tmp, err := os.CreateTemp(filepath.Dir(path), ".report-*")
	if err != nil {
		return fmt.Errorf("write the report: %w", err)
	}
	_, err = tmp.Write(data)
	if e := tmp.Close(); err == nil {
		err = e
	}
	if err == nil {
		err = os.Chmod(tmp.Name(), 0o644)
	}
	if err == nil {
		err = os.Rename(tmp.Name(), path)
	}
	if err != nil {
		os.Remove(tmp.Name())
		return fmt.Errorf("write the report: %w", err)
	}
	return nil
}

// render makes the page. It refers to nothing outside of itself.
func render(c *config, results []*Result, verdicts []Verdict) ([]byte, error) {
	data := struct {
		Config   *config
		Results  []*Result
		Verdicts []Verdict
		Rows     []row
		Legend   []legend
		Holds    bool
		Failed   int
	}{Config: c, Results: results, Verdicts: verdicts, Holds: exitCode(verdicts) == exitHolds}
	for i, v := range verdicts {
		data.Rows = append(data.Rows, row{v, i == 0 || verdicts[i-1].Arm != v.Arm})
		data.Failed += int(count(!v.Holds))
	}
	var used device.Sizes
	for _, r := range results {
		for _, call := range r.Trace.Calls {
			used[device.Ballast] = max(used[device.Ballast], call.Came)
			for p, n := range call.Base {
				used[p] = max(used[p], n, call.Planned[p])
			}
			for _, s := range call.Samples {
				for p, n := range s.InUse {
					used[p] = max(used[p], n)
				}
			}
		}
	}
	for p, n := range used {
		if n > 0 {
			data.Legend = append(data.Legend, legend{device.Purpose(p).String(), template.CSS(colours[p])})
		}
	}
	var b bytes.Buffer
	err := page.Execute(&b, &data)
	return b.Bytes(), err
}

// drawArm draws the calls of an arm.
func drawArm(r *Result) template.HTML {
	var b strings.Builder
	n := len(r.Trace.Calls)
	rows := max(1, (n+across-1)/across)
	width := across * panelWidth
	height := rows * panelHeight
	if n == 0 {
		height = 30
	}
	fmt.Fprintf(&b, `<svg viewBox="0 0 %d %d" width="%d" height="%d" role="img"><title>%s</title>`, width, height, width, height, template.HTMLEscapeString(r.Arm+": bytes over time"))
	if n == 0 {
		why := "no call of this arm was drawn"
		if r.Error != "" {
			why = "the arm did not run to its end"
		}
		fmt.Fprintf(&b, `<text x="0" y="18" class="s">%s</text>`, why)
	}
	for i := range r.Trace.Calls {
		fmt.Fprintf(&b, `<g transform="translate(%d %d)">`, i%across*panelWidth, i/across*panelHeight)
		r.Trace.Calls[i].draw(&b)
		b.WriteString("</g>")
	}
	b.WriteString("</svg>")
	return template.HTML(b.String()) // every text in it is escaped, the rest are numbers
}

// draw draws one call.
func (c *CallTrace) draw(b *strings.Builder) {
	text := func(x, y int, class, anchor, s string) {
		fmt.Fprintf(b, `<text x="%d" y="%d" class="%s" text-anchor="%s">%s</text>`, x, y, class, anchor, template.HTMLEscapeString(s))
	}
	text(plotLeft, 18, "t", "start", c.Title+": "+c.Verdict)
	word := "admitted "
	if c.Refused {
		word = "needed "
	}
	text(plotLeft, 34, "s", "start", word+showBytes(c.Admitted)+", usable "+showBytes(c.Usable))
	text(plotLeft, 49, "s", "start", "observed peak "+showBytes(c.Observed))

	top := max(c.Admitted, c.Observed, c.Planned.Total(), 1)
	for _, s := range c.Samples {
		top = max(top, s.InUse.Total())
	}
	if c.Usable <= 2*top { // else it is far above the picture, and said so
		top = max(top, c.Usable)
	}
	top += top / 12
	// The picture begins when the first byte is taken, and a little before: planning takes none.
	end := max(c.Samples[len(c.Samples)-1].Micros, 1)
	var begin int64
	if len(c.Samples) > 2 {
		begin = max(0, c.Samples[1].Micros-(end-c.Samples[1].Micros)/20)
	}
	x := func(us int64) float64 {
		return plotLeft + float64(max(us-begin, 0))/float64(max(end-begin, 1))*plotWidth
	}
	y := func(n int64) float64 { return plotTop + plotHeight - float64(n)/float64(top)*plotHeight }

	fmt.Fprintf(b, `<rect x="%d" y="%d" width="%d" height="%d" fill="#f6f8fb"/>`, plotLeft, plotTop, plotWidth, plotHeight)
	for _, part := range []int64{0, 1, 2, 3} {
		n := top * part / 3
		fmt.Fprintf(b, `<line x1="%d" x2="%d" y1="%.1f" y2="%.1f" stroke="#dde3ec"/>`, plotLeft, plotLeft+plotWidth, y(n), y(n))
		text(plotLeft-5, int(y(n))+4, "s", "end", shortBytes(n))
	}
	for p := range device.NumPurposes {
		any := false
		for _, s := range c.Samples {
			any = any || s.InUse[p] > 0
		}
		if !any {
			continue
		}
		// A band between the sum of the purposes below and the sum with this one, in steps: bytes stay until they change.
		var over, under []string
		for i, s := range c.Samples {
			var low int64
			for q := range p {
				low += max(s.InUse[q], 0)
			}
			high := low + max(s.InUse[p], 0)
			until := end
			if i+1 < len(c.Samples) {
				until = c.Samples[i+1].Micros
			}
			over = append(over, fmt.Sprintf("%.1f,%.1f %.1f,%.1f", x(s.Micros), y(high), x(until), y(high)))
			under = append(under, fmt.Sprintf("%.1f,%.1f %.1f,%.1f", x(until), y(low), x(s.Micros), y(low)))
		}
		fmt.Fprintf(b, `<polygon fill="%s" points="%s`, colours[p], strings.Join(over, " "))
		for i := len(under) - 1; i >= 0; i-- {
			b.WriteString(" " + under[i])
		}
		b.WriteString(`"/>`)
	}
	var planned int64
	for p, n := range c.Planned {
		if n > 0 {
			fmt.Fprintf(b, `<rect x="%d" y="%.1f" width="%d" height="%.1f" fill="%s"/>`, planLeft, y(planned+n), planWidth, y(planned)-y(planned+n), colours[p])
		}
		planned += n
	}
	if planned > 0 {
		text(planLeft+planWidth/2, plotTop+plotHeight+14, "s", "middle", "plan")
	}
	if c.Backward > 0 {
		fmt.Fprintf(b, `<line x1="%.1f" x2="%.1f" y1="%d" y2="%d" stroke="#111" stroke-dasharray="1 3"/>`, x(c.Backward), x(c.Backward), plotTop, plotTop+plotHeight)
		at, anchor := int(x(c.Backward))+3, "start"
		if at > plotLeft+plotWidth/2 {
			at, anchor = at-6, "end"
		}
		text(at, plotTop-3, "s", anchor, "backward")
	}
	line := func(n int64, style string) {
		fmt.Fprintf(b, `<line x1="%d" x2="%d" y1="%.1f" y2="%.1f" stroke-width="2" %s/>`, plotLeft, plotLeft+plotWidth, y(n), y(n), style)
	}
	line(c.Admitted, `stroke="#111"`)
	if c.Usable <= top {
		line(c.Usable, `stroke="#b3261e" stroke-dasharray="5 3"`)
	} else {
		text(planLeft+planWidth, plotTop-14, "s", "end", "usable is above")
	}
	if c.Refused && c.Observed == 0 {
		at := plotTop + plotHeight/2
		for _, try := range []int{plotTop + plotHeight/2, plotTop + plotHeight/4, plotTop + 3*plotHeight/4} {
			if math.Abs(y(c.Usable)-float64(try-4)) > 12 && math.Abs(y(c.Admitted)-float64(try-4)) > 12 {
				at = try
				break
			}
		}
		text(plotLeft+plotWidth/2, at, "s", "middle", "nothing ran, nothing was taken")
	}
	text(plotLeft, plotTop+plotHeight+14, "s", "start", fmt.Sprintf("%.1f", float64(begin)/1e3))
	text(plotLeft+plotWidth, plotTop+plotHeight+14, "s", "end", fmt.Sprintf("%.1f ms", float64(end)/1e3))
	parts := []string{"nothing held before"}
	if c.Base.Total() > 0 {
		parts = nil
		for p, n := range c.Base {
			if n > 0 {
				parts = append(parts, fmt.Sprintf("%v %s", device.Purpose(p), shortBytes(n)))
			}
		}
		parts[0] = "held before: " + parts[0]
	}
	if c.Came > 0 {
		parts = append(parts, fmt.Sprintf("then ballast %s", shortBytes(c.Came)))
	}
	for i := 0; i < len(parts); i += 2 { // two on a line
		text(plotLeft, plotTop+plotHeight+28+6*i, "s", "start", strings.Join(parts[i:min(i+2, len(parts))], ", "))
	}
	// A strip of all the memory: what was held, and what was left.
	held := c.Base
	held[device.Ballast] += c.Came
	all := float64(max(held.Total()+c.Usable, 1))
	at := float64(plotLeft)
	for p, n := range held {
		width := float64(n) / all * plotWidth
		if n > 0 {
			fmt.Fprintf(b, `<rect x="%.1f" y="%d" width="%.1f" height="7" fill="%s"/>`, at, plotTop+plotHeight+48, width, colours[p])
		}
		at += width
	}
	fmt.Fprintf(b, `<rect x="%d" y="%d" width="%d" height="7" fill="none" stroke="#aab3c2"/>`, plotLeft, plotTop+plotHeight+48, plotWidth)
}

// showBytes is a number with its thousands apart.
func showBytes(n int64) string {
	s := fmt.Sprint(n)
	for i := len(s) - 3; i > 0 && s[i-1] != '-'; i -= 3 {
		s = s[:i] + "," + s[i:]
	}
	return s
}

// shortBytes is a number of bytes for an axis.
func shortBytes(n int64) string {
	for _, unit := range []struct {
		size int64
		name string
	}{{1e9, "GB"}, {1e6, "MB"}, {1e3, "kB"}} {
		if n >= unit.size {
			return fmt.Sprintf("%.3g %s", float64(n)/float64(unit.size), unit.name)
		}
	}
	return fmt.Sprintf("%d B", n)
}
