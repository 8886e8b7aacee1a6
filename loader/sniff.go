package loader

import (
	"bytes"
	"encoding/binary"
	"io"
)

// sniffSize is how much of a bad file is looked at to say what it is instead.
const sniffSize = 512

const (
	truncatedHint = "a download or copy of this file stopped early; fetch it again"
	zeroHint      = "the file was laid out but its content never arrived, as after a crash or an interrupted download; fetch it again"
	convertHint   = "only safetensors files are read; convert the checkpoint, or get the repository's safetensors version"
)

// mistaken are the files that are met under a weight file's name, by how they begin.
var mistaken = []struct{ magic, what, hint string }{
	{"version https://git-lfs", "a Git LFS pointer", "the repository was cloned without its large files; run 'git lfs pull' in it"},
	{"# xet version", "a Xet pointer", "the repository was cloned without its large files; download them with the hub's own tool"},
	{"PK\x03\x04", "a zip archive", "this looks like a PyTorch checkpoint (.bin, .pt); " + convertHint},
	{"GGUF", "a GGUF file", convertHint},
	{"\x89HDF\r\n", "an HDF5 file", convertHint},
	{"\x93NUMPY", "a NumPy array", convertHint},
	{"\x1f\x8b", "a gzip archive", "unpack it first"},
	{"\x28\xb5\x2f\xfd", "a zstd archive", "unpack it first"},
}

const pageHint = "a web server's answer was saved in place of the file, often a log-in or error page; fetch it again"

// sniff says what a file that is not safetensors is instead, by its first bytes. Both results are empty if it can't tell.
func sniff(r io.ReaderAt, size int64) (what, hint string) {
	b := make([]byte, min(sniffSize, max(size, 0)))
	n, _ := readFull(r, b, 0)
	b = b[:n]
	// The shorter marks could also be the length of a header: not of a file in which a header seems to follow.
	if len(b) > prefixSize && b[prefixSize] == '{' && binary.LittleEndian.Uint64(b) <= MaxHeader {
		return "", ""
	}
	for _, m := range mistaken {
		if bytes.HasPrefix(b, []byte(m.magic)) {
			return m.what, m.hint
		}
	}
	// A pickle begins with its protocol, 2 to 5.
	if len(b) >= 2 && b[0] == 0x80 && 2 <= b[1] && b[1] <= 5 {
		return "a pickle", "this looks like a PyTorch checkpoint (.bin, .pt); " + convertHint
	}
	text := bytes.ToLower(bytes.TrimLeft(bytes.TrimPrefix(b, []byte("\xef\xbb\xbf")), " \t\r\n"))
	for _, page := range []string{"<!doctype html", "<html", "<?xml", "<error", "<head", "<body"} {
		if bytes.HasPrefix(text, []byte(page)) {
			return "a web page", pageHint
		}
	}
	if len(text) > 1 && text[0] == '{' && bytes.IndexByte(b, 0) < 0 {
		return "a JSON text", pageHint
	}
	return "", ""
}
