package main

import (
	"fmt"
	"math/big"
	"strings"
)

var units = []struct {
	name  string
	bytes int64
}{{"KiB", 1 << 10}, {"MiB", 1 << 20}, {"GiB", 1 << 30}, {"TiB", 1 << 40}, {"KB", 1e3}, {"MB", 1e6}, {"GB", 1e9}, {"TB", 1e12}, {"B", 1}, {"", 1}}

// parseSize reads a number of bytes: a whole number, or a number with one of the units. A part of a byte is dropped. Rationals, because 1.001KB
// is 1001 bytes, and no float decides what fits.
func parseSize(s string) (int64, error) {
	bad := fmt.Errorf("size %.60q is not a number of bytes above 0, such as 800000, 700MiB or 1.5GB", s)
	num := strings.TrimSpace(s)
	unit := int64(1)
	for _, u := range units {
		if rest, ok := strings.CutSuffix(num, u.name); ok {
			num, unit = strings.TrimSpace(rest), u.bytes
			break
		}
	}
	// No signs, exponents, fractions with a slash, hexadecimal, and nothing that takes long.
	if num == "" || len(num) > 40 || strings.Trim(num, "0123456789.") != "" || unit == 1 && strings.Contains(num, ".") {
		return 0, bad
	}
	x, ok := new(big.Rat).SetString(num)
	if !ok {
		return 0, bad
	}
	x.Mul(x, new(big.Rat).SetInt64(unit))
	n := new(big.Int).Quo(x.Num(), x.Denom())
	if !n.IsInt64() || n.Sign() <= 0 {
		return 0, bad
	}
	return n.Int64(), nil
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

// count is a number with the word for it.
func count(n int, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return fmt.Sprintf("%d %ss", n, what)
}
