package main

import (
	"math"
	"math/rand/v2"
	"strconv"
	"strings"
	"testing"
)

func TestSizesAreReadExactly(t *testing.T) {
	for text, want := range map[string]int64{
		"1": 1, "800000": 800000, "007": 7, " 12 ": 12, "12B": 12, "12 B": 12,
		"1KiB": 1 << 10, "1MiB": 1 << 20, "3GiB": 3 << 30, "2TiB": 2 << 40, "1KB": 1e3, "1MB": 1e6, "7GB": 7e9, "1TB": 1e12,
		"1.5GiB": 3 << 29, "0.5KiB": 512, ".5KiB": 512, "2.KB": 2000, "1 MiB": 1 << 20, "\t1\tMiB\n": 1 << 20,
		"1.001KB": 1001, "0.57KB": 570, "1.1KB": 1100, // not in floats
		"1.0009KB": 1000, "0.001KB": 1, // a part of a byte is dropped
		"9223372036854775807": math.MaxInt64, "8388607TiB": 8388607 << 40, "9007199254740993KB": 9007199254740993e3,
	} {
		if got, err := parseSize(text); err != nil || got != want {
			t.Errorf("%q is %d, want %d (%v)", text, got, want, err)
		}
	}
	for _, text := range []string{
		"", " ", "0", "0B", "0GiB", "0.0GiB", "0.0009KB", "-1", "-1GiB", "+1", "+1KiB", "1.5", "1.5B", "1e3", "1e3KB", "0x10", "0x10KiB", "1/2KiB", "1_000", "1,000",
		"1,5GB", "KiB", "B", ".", ".KiB", "1..5KB", "1.5.KB", "1kib", "1kb", "1K", "1M", "1G", "1Gi", "1PiB", "1KiBB", "1KiB B", "1 0KiB", "GiB1", "NaN", "inf", "InfGiB", "١KiB",
		"9223372036854775808", "8388608TiB", "9223372036854775807KB", "99999999999999999999999999999999999999999999", strings.Repeat("9", 1<<20) + "KB",
		"0." + strings.Repeat("0", 1<<20) + "1TB", "1\x00KB",
	} {
		if got, err := parseSize(text); err == nil {
			t.Errorf("%.40q is read as %d", text, got)
		} else if len(err.Error()) > 400 {
			t.Errorf("%.40q: an error of %d bytes", text, len(err.Error()))
		}
	}
}

func TestAShownSizeReadsBack(t *testing.T) {
	for range 10000 {
		n := rand.Int64N(math.MaxInt64)>>rand.IntN(63) + 1
		shown := showSize(n)
		exact, rounded, _ := strings.Cut(shown, " bytes")
		if got, err := parseSize(exact); err != nil || got != n {
			t.Fatalf("%d is shown as %q, which reads as %d (%v)", n, shown, got, err)
		}
		if rounded = strings.Trim(rounded, " ()"); rounded != "" {
			if got, err := parseSize(rounded); err != nil || math.Abs(float64(got)-float64(n)) > 0.051*float64(n) {
				t.Fatalf("%d is shown as %q, which reads as %d (%v)", n, shown, got, err)
			}
		}
		if got, err := parseSize(strconv.FormatInt(n, 10)); err != nil || got != n {
			t.Fatalf("%d reads as %d (%v)", n, got, err)
		}
	}
}

func FuzzParseSize(f *testing.F) {
	for _, s := range []string{"1", "1.5GiB", "-1", "9e9", "99999999999999999999TB"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		if n, err := parseSize(s); err == nil && n <= 0 || err != nil && n != 0 {
			t.Errorf("%q: %d, %v", s, n, err)
		}
	})
}
