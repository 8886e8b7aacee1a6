/* PyTorch's wheels hold Intel's MKL, which runs its AVX2 code on a CPU that is not Intel's, even where AVX-512 is there. This
 * stub, preloaded, makes it believe otherwise. Almost no user does so: the comparison's main figure is PyTorch as installed, and
 * this one stands beside it to show what the same arithmetic could reach.
 *
 *     gcc -shared -fPIC -o mkl_intel.so bench/mkl_intel.c
 *     python3 bench/compare.py --peer-preload mkl_intel.so ...
 */
int mkl_serv_intel_cpu(void) { return 1; }
int mkl_serv_intel_cpu_true(void) { return 1; }
