//go:build amd64 && !noasm

#include "textflag.h"

// func prefetch(mem []byte)
TEXT ·prefetch(SB), NOSPLIT, $0-24
	MOVQ mem_base+0(FP), AX
	MOVQ mem_len+8(FP), CX
	SUBQ $64, CX
	JLT  done

line:
	PREFETCHT0 (AX)
	ADDQ $64, AX
	SUBQ $64, CX
	JGE  line

done:
	RET
