package loader

import "fmt"

// DType is the type of a tensor's elements, as the safetensors format names it. Values are little-endian. The zero value
// is no type.
type DType uint8

// The types of the format, in the order in which its reference implementation lists them.
const (
	BOOL    DType = iota + 1
	F4            // e2m1, two elements to a byte
	F6_E2M3       // four elements to three bytes
	F6_E3M2       // four elements to three bytes
	U8
	I8
	F8_E5M2
	F8_E4M3
	F8_E8M0 // a power of two: the scale of a block
	F8_E4M3FNUZ
	F8_E5M2FNUZ
	I16
	U16
	F16
	BF16
	I32
	U32
	F32
	C64 // two float32: real, imaginary
	F64
	I64
	U64
)

var dtypes = [...]struct {
	name string
	bits int
}{
	BOOL: {"BOOL", 8}, F4: {"F4", 4}, F6_E2M3: {"F6_E2M3", 6}, F6_E3M2: {"F6_E3M2", 6}, U8: {"U8", 8}, I8: {"I8", 8},
	F8_E5M2: {"F8_E5M2", 8}, F8_E4M3: {"F8_E4M3", 8}, F8_E8M0: {"F8_E8M0", 8},
	F8_E4M3FNUZ: {"F8_E4M3FNUZ", 8}, F8_E5M2FNUZ: {"F8_E5M2FNUZ", 8},
	I16: {"I16", 16}, U16: {"U16", 16}, F16: {"F16", 16}, BF16: {"BF16", 16},
	I32: {"I32", 32}, U32: {"U32", 32}, F32: {"F32", 32},
	C64: {"C64", 64}, F64: {"F64", 64}, I64: {"I64", 64}, U64: {"U64", 64},
}

// Bits is the size of one element in bits: 4, 6, 8, 16, 32 or 64; 0 for a value that is no type.
func (d DType) Bits() int {
	if int(d) < len(dtypes) {
		return dtypes[d].bits
	}
	return 0
}

// String is the type's name in a header, for instance "BF16".
func (d DType) String() string {
	if d.Bits() == 0 {
		return fmt.Sprintf("DType(%d)", uint8(d))
	}
	return dtypes[d].name
}

// ParseDType returns the type with this name, spelled as in a header: "f32" is none.
func ParseDType(name string) (DType, bool) { return parseDType([]byte(name)) }

func parseDType(name []byte) (DType, bool) {
	for d := BOOL; int(d) < len(dtypes); d++ {
		if dtypes[d].name == string(name) {
			return d, true
		}
	}
	return 0, false
}
