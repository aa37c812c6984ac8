/* Shifts the time of day of a process by as many seconds as the file WALL_CLOCK_SHIFT says: preloaded. */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static long shift(void)
{
    const char *path = getenv("WALL_CLOCK_SHIFT");
    FILE *file = path ? fopen(path, "r") : NULL;
    long seconds = 0;
    if (file) {
        if (fscanf(file, "%ld", &seconds) != 1)
            seconds = 0;
        fclose(file);
    }
    return seconds;
}

int clock_gettime(clockid_t clock, struct timespec *now)
{
    int refused = (int)syscall(SYS_clock_gettime, clock, now);
    if (!refused && clock == CLOCK_REALTIME)
        now->tv_sec += shift();
    return refused;
}
