package main

import (
	"fmt"
	"math"
	"strconv"
	"strings"
)

var units = []struct {
	name  string
	bytes float64
}{{"KiB", 1 << 10}, {"MiB", 1 << 20}, {"GiB", 1 << 30}, {"TiB", 1 << 40}, {"KB", 1e3}, {"MB", 1e6}, {"GB", 1e9}, {"TB", 1e12}, {"B", 1}}

// parseSize reads a number of bytes: a whole number, or a number with one of the units.
func parseSize(s string) (int64, error) {
	bad := fmt.Errorf("size %q is not a number of bytes above 0, such as 800000, 700MiB or 1.5GB", s)
	text := strings.TrimSpace(s)
	if n, err := strconv.ParseInt(text, 10, 64); err == nil {
		if n <= 0 {
			return 0, bad
		}
		return n, nil
	}
	for _, u := range units {
		num, ok := strings.CutSuffix(text, u.name)
		if !ok {
			continue
		}
		num = strings.TrimSpace(num)
		if n, err := strconv.ParseInt(num, 10, 64); err == nil && n > 0 && float64(n)*u.bytes < math.MaxInt64 {
			return n * int64(u.bytes), nil
		}
		if strings.Trim(num, "0123456789.") != "" { // no signs, exponents, hexadecimal, infinities
			return 0, bad
		}
		x, err := strconv.ParseFloat(num, 64)
		if x *= u.bytes; err != nil || !(x >= 1 && x < math.MaxInt64) {
			return 0, bad
		}
		return int64(x), nil
	}
	return 0, bad
}

// showSize prints bytes for people, the exact number beside a rounded one.
func showSize(n int64) string {
	switch {
	case n >= 1<<30:
		return fmt.Sprintf("%d bytes (%.2f GiB)", n, float64(n)/(1<<30))
	case n >= 1<<20:
		return fmt.Sprintf("%d bytes (%.1f MiB)", n, float64(n)/(1<<20))
	}
	return fmt.Sprintf("%d bytes", n)
}
