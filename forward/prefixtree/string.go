package prefixtree

import (
	"fmt"
	"strconv"
	"strings"
)

// Limits of the printed forms, which are for eyes: a terminal's worth of lines, and a line's worth of levels and of ranges.
const (
	maxLines  = 64
	maxIndent = 16
	maxRanges = 8
)

// String is a summary line and the segments as an indented tree.
func (t *Tree) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s, %s, %s, %s\n", count(len(t.Terminals), "row"), count(t.Logical, "token"),
		count(len(t.Segments), "segment"), count(len(t.Decisions), "decision"))
	for i := range t.Segments {
		if !line(&b, i, len(t.Segments), t.Segments[i].Depth) {
			break
		}
		s := &t.Segments[i]
		span(&b, i, s.Start, s.End, s.Rows)
	}
	return b.String()
}

// String is a summary line and the spans as an indented tree.
func (l *Layout) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s, %s packed into %d, %s, %s, sharing %s\n", count(len(l.Terminals), "row"), count(l.Logical, "token"), l.Packed,
		count(len(l.Spans), "span"), count(l.Depth, "level"), ranges(l.Decisions))
	printSpans(&b, l.Spans)
	return b.String()
}

// String is a summary line and the spans as an indented tree, without the tokens.
func (b *Batch) String() string {
	var sb strings.Builder
	fmt.Fprintf(&sb, "%s, %s in %s\n", count(b.Rows, "row"), count(len(b.Tokens), "packed token"), count(len(b.Spans), "span"))
	printSpans(&sb, b.Spans)
	return sb.String()
}

func printSpans(b *strings.Builder, spans []Span) {
	depths := make([]int, min(len(spans), maxLines))
	for i := range spans {
		if i < len(depths) {
			depths[i] = 1
			if p := spans[i].Parent; p >= 0 && p < i {
				depths[i] += depths[p]
			}
		}
		if !line(b, i, len(spans), depths[min(i, len(depths)-1)]) {
			return
		}
		span(b, i, spans[i].Start, spans[i].End, spans[i].Rows)
	}
}

// line begins line i of n, or ends the list and returns false if there are too many.
func line(b *strings.Builder, i, n, depth int) bool {
	if i == maxLines {
		fmt.Fprintf(b, "  and %d more\n", n-i)
		return false
	}
	b.WriteString(strings.Repeat("  ", min(depth, maxIndent)))
	if depth > maxIndent {
		fmt.Fprintf(b, "(level %d) ", depth)
	}
	return true
}

func span(b *strings.Builder, i, start, end int, rows []int) {
	noun := "row "
	if len(rows) != 1 {
		noun = "rows "
	}
	fmt.Fprintf(b, "%d: [%d,%d) %s, %s%s\n", i, start, end, count(end-start, "token"), noun, ranges(rows))
}

// ranges prints ascending numbers as 0-3,5,7-9.
func ranges(list []int) string {
	if len(list) == 0 {
		return "none"
	}
	var b strings.Builder
	for i, n := 0, 0; i < len(list); n++ {
		if n == maxRanges {
			fmt.Fprintf(&b, ",.. (%d in all)", len(list))
			break
		}
		if i > 0 {
			b.WriteByte(',')
		}
		j := i + 1
		for j < len(list) && list[j] == list[j-1]+1 {
			j++
		}
		b.WriteString(strconv.Itoa(list[i]))
		if j-i > 1 {
			b.WriteByte('-')
			b.WriteString(strconv.Itoa(list[j-1]))
		}
		i = j
	}
	return b.String()
}

func count(n int, noun string) string {
	if n != 1 {
		noun += "s"
	}
	return strconv.Itoa(n) + " " + noun
}
