/* NCCL's library beside a service: a process whose service has gone, and one that was forked, get sessions of their own. */
#define _POSIX_C_SOURCE 200809L
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

typedef struct { char internal[128]; } ncclUniqueId;
int ncclGetUniqueId(ncclUniqueId *);
const char *ncclGetLastError(void *);

static void id(const char *when) {
    ncclUniqueId id;
    if (ncclGetUniqueId(&id) == 0) return;
    fprintf(stderr, "%s: %s\n", when, ncclGetLastError(NULL));
    exit(1);
}

static void say(const char *what) {
    puts(what);
    fflush(stdout);
}

/* Waits until the test has looked. */
static void go_on(char *line, int room) {
    if (!fgets(line, room, stdin)) exit(2);
    line[strcspn(line, "\n")] = 0;
}

int main(void) {
    char line[4096];
    int status = 1;
    setvbuf(stdin, NULL, _IONBF, 0);
    id("at first");
    say("has a session");
    go_on(line, sizeof line);
    setenv("MCCS_SOCKET", line, 1);
    do {
        /* It may not have heard yet that the service has gone. */
        id("when the service has gone");
        say("has another");
        go_on(line, sizeof line);
    } while (!strcmp(line, "again"));
    pid_t child = fork();
    if (child == 0) {
        id("in a child");
        say("has its own");
        go_on(line, sizeof line);
        return 0;
    }
    if (waitpid(child, &status, 0) != child || status != 0) return 3;
    id("when the child has ended");
    say("goes on");
    go_on(line, sizeof line);
    return 0;
}
