/* Times one collective with MPI as mccs-perf does: float, whole calls, quantiles of the slowest rank, JSON lines.
 * usage: mpi_bench OPERATION BEGIN_BYTES END_BYTES FACTOR ITERATIONS WARMUP
 * Bytes as nccl-tests counts them: all ranks' data for all_gather and reduce_scatter. Data are checked once a size. */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int ascending(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void call(const char *op, const float *send, float *recv, int count) {
    if (!strcmp(op, "all_reduce"))
        MPI_Allreduce(send, recv, count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
    else if (!strcmp(op, "all_reduce_in_place"))
        MPI_Allreduce(MPI_IN_PLACE, recv, count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
    else if (!strcmp(op, "all_gather"))
        MPI_Allgather(send, count, MPI_FLOAT, recv, count, MPI_FLOAT, MPI_COMM_WORLD);
    else if (!strcmp(op, "reduce_scatter"))
        MPI_Reduce_scatter_block(send, recv, count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
    else
        MPI_Bcast(recv, count, MPI_FLOAT, 0, MPI_COMM_WORLD);
}

int main(int argc, char **argv) {
    int rank, nranks;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &nranks);
    if (argc != 7) return 2;
    const char *op = argv[1];
    size_t begin = strtoull(argv[2], 0, 10), end = strtoull(argv[3], 0, 10), factor = strtoull(argv[4], 0, 10);
    int iterations = atoi(argv[5]), warmup = atoi(argv[6]);
    int blocks = !strcmp(op, "all_gather") || !strcmp(op, "reduce_scatter");
    float *send = malloc(end + 4096), *recv = malloc(end + 4096);
    double *times = malloc(sizeof *times * iterations);
    for (size_t bytes = begin; bytes <= end; bytes *= factor) {
        size_t count = bytes / sizeof(float) / (blocks ? nranks : 1);
        size_t total = !strcmp(op, "reduce_scatter") ? count * nranks : count;
        for (size_t i = 0; i < total; i++) send[i] = recv[i] = (float)((i + rank) % 5);
        call(op, send, recv, (int)count);
        for (size_t i = 0; i < count; i++) {
            float right = 0;
            size_t at = !strcmp(op, "reduce_scatter") ? count * rank + i : i;
            for (int r = 0; r < nranks; r++) right += (float)((at + r) % 5);
            if (!strcmp(op, "broadcast") || !strcmp(op, "all_gather")) right = (float)(i % 5);
            if (recv[i] != right) {
                fprintf(stderr, "wrong result at %zu\n", i);
                MPI_Abort(MPI_COMM_WORLD, 1);
            }
        }
        for (int i = 0; i < warmup + iterations; i++) {
            double start = MPI_Wtime();
            call(op, send, recv, (int)count);
            if (i >= warmup) times[i - warmup] = (MPI_Wtime() - start) * 1e6;
        }
        qsort(times, iterations, sizeof *times, ascending);
        double own[3] = {times[(iterations + 1) / 2 - 1], times[(iterations * 99 + 99) / 100 - 1], times[0]}, all[3];
        MPI_Reduce(own, all, 3, MPI_DOUBLE, MPI_MAX, 0, MPI_COMM_WORLD);
        if (rank == 0) {
            printf("{\"op\":\"%s\",\"bytes\":%zu,\"nranks\":%d,\"iters\":%d,\"p50_us\":%.2f,\"p99_us\":%.2f,\"min_us\":%.2f}\n",
                   op, bytes, nranks, iterations, all[0], all[1], all[2]);
            fflush(stdout);
        }
    }
    MPI_Finalize();
    return 0;
}
