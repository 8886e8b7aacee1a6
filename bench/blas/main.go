// Command blas measures this engine's matrix product against OpenBLAS, and both against what the CPU's multiply-add units can do.
//
//	go run . -lib PATH/libopenblas.so.0 -threads 1,2
//
// It is a module of its own, so that the engine does not depend on a loader of foreign libraries. It needs Linux.
//
// What is timed is y = x * wᵀ in float32: x is [M, K], w is [N, K]. OpenBLAS is called as cblas_sgemm, which packs both operands on
// each call; ours keeps w packed, as a model's frozen weights are, in float32 or as bfloat16 that it widens on each call.
//
// Every backend runs in a process of its own, pinned to as many CPUs as it has threads; rounds go through all backends in turn, and
// a figure is the median (or, with -stat best, the best) over all runs of all rounds. OpenBLAS is tried with the core type that it detects (auto) and with those of
// -cores (OPENBLAS_CORETYPE): old builds do not know new CPUs and fall back to slow code, and a forced type may compute wrong results
// or use instructions that the CPU lacks. So each process first checks its results against float64, on the shapes that are timed and on odd ones; one
// that fails is shown with its error and never compared. The ratio is ours over the fastest correct OpenBLAS.
package main

import (
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// shape is y[M, N] = x[M, K] * w[N, K]ᵀ.
type shape struct{ M, N, K int }

func (s shape) String() string { return fmt.Sprintf("%dx%dx%d", s.M, s.N, s.K) }
func (s shape) flops() float64 { return 2 * float64(s.M) * float64(s.N) * float64(s.K) }

const (
	engineShapes = "512x1024x1024,2048x1024x1024,4096x1024x1024,512x2560x2560,2048x2560x2560,512x9728x2560,512x2560x9728"
	oddShapes    = "1x1x1,1x576x64,7x33x65,37x53x71,129x65x577" // checked, not timed
	tolerance    = 1e-5                                         // on |error| / sum |x w|; float32 sums of 10,000 terms reach about 1e-6
)

// product is one backend's matrix product. prepare gets the operands (contiguous) and returns what is to be timed.
type product interface {
	describe() string
	prepare(s shape, x, w, y []float32) (run func(), result func() []float32, err error)
	close()
}

// report is what a child process prints.
type report struct {
	Name  string               `json:"name"`            // what the library says it runs
	Error string               `json:"error,omitempty"` // why it must not be compared
	Worst float64              `json:"worst"`           // largest |error| / sum |x w|
	Runs  map[string][]float64 `json:"runs"`            // GFLOP/s by shape
}

func main() {
	lib := flag.String("lib", "", "path of libopenblas (empty: ours alone)")
	threadList := flag.String("threads", "1,2", "thread counts")
	coreList := flag.String("cores", "auto,Haswell,Zen,SkylakeX,Cooperlake", "values of OPENBLAS_CORETYPE to try; auto: unset")
	kernelList := flag.String("kernels", "auto", "values of TRAINERRANK_KERNEL to try; auto: unset")
	storeList := flag.String("weights", "f32,bf16", "how our weights are stored")
	shapeList := flag.String("shapes", engineShapes, "MxNxK, comma separated")
	rounds := flag.Int("rounds", 3, "rounds through all backends")
	runs := flag.Int("runs", 5, "timed runs per shape and round")
	stat := flag.String("stat", "median", "figure per shape: median of the runs, or best (for a machine that others use too)")
	asJSON := flag.Bool("json", false, "print every figure as JSON instead of a table")
	child := flag.String("child", "", "internal: the backend to run in this process")
	threads := flag.Int("child-threads", 1, "internal")
	flag.Parse()
	shapes, err := parseShapes(*shapeList)
	if err == nil {
		if *child != "" {
			err = json.NewEncoder(os.Stdout).Encode(runChild(*child, *lib, *threads, shapes, *runs))
		} else {
			var backends []backend
			if *lib != "" {
				for _, c := range split(*coreList) {
					backends = append(backends, backend{"openblas " + c, "openblas", "OPENBLAS_CORETYPE", c})
				}
			}
			for _, k := range split(*kernelList) {
				for _, s := range split(*storeList) {
					backends = append(backends, backend{"ours " + k + ", " + s + " weights", "ours-" + s, "TRAINERRANK_KERNEL", k})
				}
			}
			err = compare(os.Args[1:], backends, split(*threadList), shapes, *rounds, *stat, *asJSON)
		}
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "blas:", err)
		os.Exit(1)
	}
}

func split(s string) []string {
	return slices.DeleteFunc(strings.Split(s, ","), func(p string) bool { return p == "" })
}

func parseShapes(list string) ([]shape, error) {
	var out []shape
	for _, t := range split(list) {
		var s shape
		if n, err := fmt.Sscanf(t, "%dx%dx%d", &s.M, &s.N, &s.K); n != 3 || err != nil || min(s.M, s.N, s.K) < 1 {
			return nil, fmt.Errorf("shape %q: want MxNxK", t)
		}
		out = append(out, s)
	}
	return out, nil
}

// backend is a column of the table: what a child runs, and the one variable set for it ("auto": unset).
type backend struct{ name, child, variable, value string }

func compare(args []string, backends []backend, threadList []string, shapes []shape, rounds int, stat string, asJSON bool) error {
	figure := map[string]func([]float64) float64{"median": median, "best": best}[stat]
	if figure == nil {
		return fmt.Errorf("-stat %q: want median or best", stat)
	}
	type column struct {
		Backend string
		Threads int
		report
	}
	var all []column
	for _, t := range threadList {
		threads, err := strconv.Atoi(t)
		if err != nil || threads < 1 {
			return fmt.Errorf("-threads %q", t)
		}
		columns := []column{{Backend: "multiply-add peak", Threads: threads, report: report{Runs: map[string][]float64{}}}}
		for _, b := range backends {
			columns = append(columns, column{Backend: b.name, Threads: threads, report: report{Runs: map[string][]float64{}}})
		}
		for round := range rounds {
			for i := range columns {
				c := &columns[i]
				if c.Error != "" {
					continue
				}
				b := backend{child: "peak"}
				if i > 0 {
					b = backends[i-1]
				}
				fmt.Fprintf(os.Stderr, "%d threads, round %d: %s\n", threads, round+1, c.Backend)
				r := spawn(args, b, threads)
				c.Name, c.Error, c.Worst = r.Name, r.Error, max(c.Worst, r.Worst)
				for s, v := range r.Runs {
					c.Runs[s] = append(c.Runs[s], v...)
				}
			}
		}
		all = append(all, columns...)
	}
	if asJSON {
		return json.NewEncoder(os.Stdout).Encode(all)
	}
	fmt.Printf("%s; %s; %s of the runs of %d rounds\n", cpuModel(), runtime.Version(), stat, rounds)
	for at := 0; at < len(all); at += len(backends) + 1 {
		columns := all[at : at+len(backends)+1]
		peak := 0.0
		for _, v := range columns[0].Runs {
			peak = max(peak, figure(v))
		}
		fmt.Printf("\n%d threads, GFLOP/s; multiply-add peak %.0f (%s)\n\n| backend | runs as |", columns[0].Threads, peak, columns[0].Name)
		for _, s := range shapes {
			fmt.Printf(" %v |", s)
		}
		fmt.Printf(" error |\n|%s\n", strings.Repeat(" --- |", len(shapes)+3))
		rival := map[string]float64{} // of the correct OpenBLAS columns
		for _, c := range columns[1:] {
			fmt.Printf("| %s | %s |", c.Backend, c.Name)
			if c.Error != "" {
				fmt.Printf("%s %s |\n", strings.Repeat(" - |", len(shapes)), c.Error)
				continue
			}
			for _, s := range shapes {
				g := figure(c.Runs[s.String()])
				if strings.HasPrefix(c.Backend, "openblas") {
					rival[s.String()] = max(rival[s.String()], g)
				}
				fmt.Printf(" %.0f |", g)
			}
			fmt.Printf(" %.1e |\n", c.Worst)
		}
		for _, c := range columns[1:] {
			if len(rival) == 0 || c.Error != "" || strings.HasPrefix(c.Backend, "openblas") {
				continue
			}
			fmt.Printf("| **%s / best OpenBLAS** | |", c.Backend)
			for _, s := range shapes {
				fmt.Printf(" **%.2f** |", figure(c.Runs[s.String()])/rival[s.String()])
			}
			fmt.Println(" |")
		}
	}
	return nil
}

// spawn runs one backend in a process of its own on the first CPUs that this one may use.
func spawn(args []string, b backend, threads int) (r report) {
	fail := func(format string, a ...any) report { return report{Error: fmt.Sprintf(format, a...)} }
	self, err := os.Executable()
	if err != nil {
		return fail("%v", err)
	}
	cmd := exec.Command(self, append(slices.Clone(args), "-child", b.child, "-child-threads", strconv.Itoa(threads))...)
	for _, e := range os.Environ() {
		if k, _, _ := strings.Cut(e, "="); !strings.HasPrefix(k, "OPENBLAS_") && !strings.HasPrefix(k, "OMP_") && !strings.HasPrefix(k, "TRAINERRANK_") &&
			k != "GOMAXPROCS" && k != "GOGC" && k != "GOMEMLIMIT" {
			cmd.Env = append(cmd.Env, e)
		}
	}
	cmd.Env = append(cmd.Env, "OPENBLAS_NUM_THREADS="+strconv.Itoa(threads))
	if b.value != "" && b.value != "auto" {
		cmd.Env = append(cmd.Env, b.variable+"="+b.value)
	}
	var out, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &stderr
	// A child inherits the affinity of the thread that starts it.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var was, now unix.CPUSet
	if err := unix.SchedGetaffinity(0, &was); err != nil {
		return fail("%v", err)
	}
	for cpu, n := 0, 0; n < threads; cpu++ {
		if cpu >= len(was)*64 {
			return fail("%d threads, %d CPUs", threads, was.Count())
		}
		if was.IsSet(cpu) {
			now.Set(cpu)
			n++
		}
	}
	if err := unix.SchedSetaffinity(0, &now); err != nil {
		return fail("%v", err)
	}
	err = cmd.Run()
	if e := unix.SchedSetaffinity(0, &was); e != nil && err == nil {
		err = e
	}
	if err != nil {
		first, _, _ := strings.Cut(strings.TrimSpace(stderr.String()), "\n")
		return fail("%v: %s", err, first)
	}
	if err := json.Unmarshal(out.Bytes(), &r); err != nil {
		return fail("%v", err)
	}
	return r
}

func runChild(name, lib string, threads int, shapes []shape, runs int) report {
	r := report{Runs: map[string][]float64{}}
	if name == "peak" {
		var kind string
		for range runs {
			var g float64
			g, kind = measurePeak(threads)
			r.Runs["peak"] = append(r.Runs["peak"], g)
		}
		r.Name = kind
		return r
	}
	p, err := open(name, lib, threads)
	if err != nil {
		r.Error = err.Error()
		return r
	}
	defer p.close()
	r.Name = p.describe()
	odd, _ := parseShapes(oddShapes)
	for i, s := range slices.Concat(odd, shapes) {
		worst, gflops, err := measure(p, s, runs, i >= len(odd), strings.HasSuffix(name, "bf16"))
		r.Worst = max(r.Worst, worst)
		if math.IsNaN(worst) {
			r.Worst = math.MaxFloat64 // JSON has no NaN
		}
		if err == nil && !(worst <= tolerance) {
			err = fmt.Errorf("WRONG RESULT at %v: error %.2g of sum |x w|", s, worst)
		}
		if err != nil {
			r.Error = err.Error()
			return r
		}
		if i >= len(odd) {
			r.Runs[s.String()] = gflops
		}
	}
	return r
}

func open(name, lib string, threads int) (product, error) {
	if name == "openblas" {
		return openBLAS(lib, threads)
	}
	return openOurs(strings.TrimPrefix(name, "ours-"), threads)
}

// measure checks a shape and, if timed, returns the GFLOP/s of each run. A run repeats the product until it lasts 20 ms at least.
func measure(p product, s shape, runs int, timed, round bool) (worst float64, gflops []float64, err error) {
	x, w, y := floats(s.M*s.K), floats(s.N*s.K), floats(s.M*s.N)
	defer func() {
		for _, m := range [][]float32{x, w, y} {
			err = firstError(err, unmap(m))
		}
	}()
	rng := rand.New(rand.NewPCG(1, uint64(s.M)<<40|uint64(s.N)<<20|uint64(s.K)))
	for i := range x {
		x[i] = rng.Float32()*2 - 1
	}
	for i := range w {
		w[i] = rng.Float32()*2 - 1
		if round { // to what bfloat16 can hold, so that one reference serves all
			w[i] = math.Float32frombits(math.Float32bits(w[i]) &^ 0xffff)
		}
	}
	for i := range y {
		y[i] = float32(math.NaN())
	}
	run, result, err := p.prepare(s, x, w, y)
	if err != nil {
		return 0, nil, err
	}
	run()
	worst = check(s, x, w, result(), rng)
	if !timed || !(worst <= tolerance) {
		return worst, nil, nil
	}
	start := time.Now()
	run()
	repeat := max(1, int(20*time.Millisecond/max(time.Microsecond, time.Since(start))))
	for range runs {
		start := time.Now()
		for range repeat {
			run()
		}
		gflops = append(gflops, s.flops()*float64(repeat)/time.Since(start).Seconds()/1e9)
	}
	return worst, gflops, nil
}

// check compares rows of y with a float64 product: all of a small result, the first, the last and two others of a large one. It
// returns the largest |error| relative to the sum of |x w|; NaN if there is one.
func check(s shape, x, w, y []float32, rng *rand.Rand) float64 {
	rows := []int{0, s.M - 1, rng.IntN(s.M), rng.IntN(s.M)}
	if s.flops() < 1e7 {
		rows = rows[:0]
		for i := range s.M {
			rows = append(rows, i)
		}
	}
	worst := 0.0
	for _, i := range rows {
		for j := range s.N {
			var sum, size float64
			wj := w[j*s.K:][:s.K]
			for k, v := range x[i*s.K:][:s.K] {
				t := float64(v) * float64(wj[k])
				sum += t
				size += math.Abs(t)
			}
			worst = max(worst, math.Abs(float64(y[i*s.N+j])-sum)/size) // max keeps a NaN
		}
	}
	return worst
}

func median(v []float64) float64 {
	if len(v) == 0 {
		return math.NaN()
	}
	v = slices.Sorted(slices.Values(v))
	return (v[len(v)/2] + v[(len(v)-1)/2]) / 2
}

func best(v []float64) float64 {
	if len(v) == 0 {
		return math.NaN()
	}
	return slices.Max(v)
}

func firstError(a, b error) error {
	if a != nil {
		return a
	}
	return b
}

func cpuModel() string {
	text, _ := os.ReadFile("/proc/cpuinfo")
	for line := range strings.Lines(string(text)) {
		if k, v, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(k) == "model name" {
			return strings.TrimSpace(v)
		}
	}
	return runtime.GOARCH
}
