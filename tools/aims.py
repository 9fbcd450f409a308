"""The aims: every bound that a benchmark or a test judges by, once, with what it is of.

What misses one fails, and so does `python -m tools.check`, which runs all and prints this table. Bounds that follow
from a row, such as what a number format allows, stand with the rows; what nobody judges by, such as the time after
which a tool that stands still is stopped, stands in the tool.

Seconds and milliseconds are the reference machine's, whose CPU does the loop of `tools/machine.py` in `LOOP_S`. What is
"of CPU" is shorter on a faster machine and longer on a slower one, and `machine.limit` says by how much. Waits for
timers and for other processes, "by the clock", are longer on a slower machine only. Simulated and predicted
milliseconds are the same anywhere.
"""

from __future__ import annotations

# The code's shape, in lines, and what a signature may ask of a reader; of tools and tests lengths alone:
# tests/pure/test_layers.py.
MAX_FILE, MAX_FUNCTION = 700, 60
MAX_DIRECT = 8  # files directly in ds_hydra/
MIN_COMMENTS = 0.045  # of the lines that are not empty
MAX_POSITIONAL, MAX_WIDE = 7, 8  # a function with more parameters is wide; so many may be

# Set-up: bench_costs.
EXAMINED_S = 4.0  # of CPU, for a model of 64 layers, on the rank that looks at it

# Of `machine.loop_s`: what it takes where simulating a step on 1,024 ranks took 1.9 s, as when most aims were set.
LOOP_S = 0.32

# What newcomers see: check_gains, tests/test_docs.py.
SHIPPED_OFF = 1e-3  # of a step's time in the figures that come with the package
FEW_STEPS_OFF = 0.05  # by which another set-up may be better on two of the steps
FIRST_FIGURE_CPU_S = 5.0  # of CPU, of `ds-hydra demo`
SILENT_S = 10.0  # by the clock, on any machine: what the demo sets itself

# Predictions, relative: bench_prediction, bench_gpu, bench_hosts, tests/test_published.py, test_predicted_memory.py.
STEP_MEDIAN, STEP_P90 = 0.08, 0.20  # of a step's time
QUICK_STAGES_MEDIAN, QUICK_STAGES_P90 = 0.35, 0.70  # of stages' CPU time within one minute of a virtual machine
CHUNKED_ERROR = 1.5  # times that error, with chunks and split backwards
MEMORY = 0.08  # of a rank's peak
LAYOUT_MEMORY = 0.05  # the same, in drawn layouts, followed through their schedules
# The longest sequence on ranks that share tokens over the published one; the same with functions.
MAX_LENGTH_SHARED, MAX_LENGTH_FUNCTIONS = 0.9, 1.1
COEFFICIENT = 0.05  # of one that a fit calls identifiable, from times with 3 % noise
PUBLISHED_CHOICE = 0.03  # by how much the fastest may be faster than what a paper chose, by the model

# Slow links: bench_owners. The mixture's step over its bound; what owners of their own may cost.
MIXTURE_BOUND, OWNERS_LOSE = 1.6, 0.005

HOSTS_BYTES, HOSTS_STEP = 0.02, 0.10  # of bytes between two hosts; of a step's time there, the median strategy

# Machines that have lost a rank: bench_hetero. Tokens per second and rank over the full machine's, by ranks.
ODD_NODES = {7: 0.95, 15: 0.95, 31: 0.97, 63: 0.97}
# Devices of two classes: bench_hetero.
EMULATED_UNEQUAL = 0.01  # the simulator's time, by the emulated cluster's
UNEQUAL_PLANS, UNEQUAL_MEDIAN, UNEQUAL_P95 = 1000, 0.02, 0.08  # the planner's time against the simulation's
MIXED_GAP, UNIFORM_LAYOUT = 0.03, 1.3  # of plans; the best layout of one scheme over ours, on as many of either class
SLICED_GAIN = 1.05  # a step by strategies without slices, over one with
# A rank that becomes slow: steps until plans count with its pace; of the throughput lost, what is won back, times what
# there is to win: all but its pipeline's share; of the throughput before, when it has recovered.
FOLLOWS_SLOW, WON_BACK, RECOVERED_RATE = 20, 0.9, 0.99
HETU_PLAN, MIXED_PLANNING_S = 1.02, 1.0  # of a step by Hetu's own plan; of CPU, a proposal and the step's plan

# The planner: bench_planner, bench_systems.
PLAN_OVER_STEP = 0.5  # CPU time of a plan over the time of its step, the median
PLAN_MS = {64: 10.0, 1024: 150.0}  # of CPU, by ranks, the median step
CHUNKED_PLAN_MS = {32: 500.0, 64: 500.0, 1024: 3000.0}  # the same, with slices, split backwards and V's
FIRST_PLAN_S = 1.5  # of CPU, with what is imported, from compiled kernels that are on disk
GROWTH_MS = {200_000: 10.0, 2_000_000: 200.0, 20_000_000: 2500.0}  # of CPU, by tokens: 190, 1,900 and 19,000 sequences
GROWTH_STEP_MS = {200_000: 3610.82, 2_000_000: 37925.03}  # the mean step, as searched with long repairs
GROWTH_STEP = 1.001  # over that
GROWTH_RATIO = 12.0  # of CPU, 95,000 sequences over 9,500, in one run
REORDERED_GAIN = 1.02  # of the mean step of 50K tokens over that of steps sorted two by two
MANY_RANKS_MS = 800.0  # of CPU, 8,192 ranks
PLAN_GAP = {64: 0.025, 1024: 0.01}  # certified, the median step
PROPOSAL_S = {(64, False): 2, (64, True): 20, (1024, False): 5, (1024, True): 60}  # of CPU, by ranks, thorough or not
SIMULATED_MS = {"CommonCrawl-like": 3650.0, "Wikipedia": 4200.0, "pretraining": 4450.0}  # simulated, 32B, 64 GPUs
CHUNKED_GAIN = {"CommonCrawl-like": 0.02, "Wikipedia": 0.04, "pretraining": 0.07}  # of chunks: 7B, 32 GPUs
CHUNKED_MS = {"CommonCrawl-like": 3410.0, "Wikipedia": 3530.0, "pretraining": 3740.0}  # predicted, with chunks
COMPOSED_GAIN, COMPOSED_SHIFT_GAIN = 0.01, 0.015  # of a step, over whole candidates that were proposed quickly
COMPOSED_CHUNKED = 1.0  # the step with composed strategies over the one without, chunked candidates, same tries
HIGHS_MS, HIGHS_SHARE = 150.0, 0.1  # of CPU in a step; seconds of CPU in a predicted second
PROPOSAL_CHUNKED_S = 60.0  # of CPU, with long contexts
SYSTEM_NOT_SLOWER = 0.99  # the best shipped system's time over ours, in the mean of ten cells
RATES_OFF = 0.1  # of tables from public runs that they were not fitted to, the median
SYSTEM_GAP, ENOUGH_SEQUENCES = 0.08, 20  # our median gap, in cells whose steps have so many sequences
# Costs that are wrong between shapes, over steps by the true ones: bench_wrong_costs. The first steps at 10 %, those
# from step 60 on by the error, over the best layout of one shape found by trial; corrections of costs that were right.
FIRST_STEPS, LATER_STEPS, OVER_TRIAL, CORRECTION_COSTS = 1.10, {0.1: 1.03, 0.2: 1.06}, 1.02, 1.003
PERMITTED = 1.001  # the step of a job that may recompute its layers, over the better of both ways: bench_recomputation
# Images: the mean and the worst cell over the best layout in all steps; over a tower on each rank: bench_images.
IMAGES_STATIC, IMAGES_WORST, IMAGES_EVERYWHERE = 1.08, 0.98, 2.0
# Images: how long a step is, at most, over it with all images shared among ranks for nothing.
IMAGES_WAIT = 1.05
WAIT_FOR_PLAN_MS = 10.0  # by the clock, in a step of 64 ranks
# Of CPU, for a step on 1024 ranks, whether its strategy is known or not: a third of what each took while not known,
# when plans of layers that travel alike, sizes of buckets and orders of messages were found again and again.
SIMULATOR_S = {
    "16*tp16 + 32*tp8pp2 + 16*tp4pp2 + 8*tp4pp4": 0.51, "64*tp16": 0.34, "1024*tp1": 0.93,
    "8*tp16 + 16*tp8 + 32*tp4pp4 + 32*tp2pp4": 0.56, "2*tp16 + 4*tp8pp4 + 104*tp4pp2 + tp2pp4 + 3*tp4pp2": 0.87,
}  # fmt: skip

# Simulated, emulated and real steps: bench_prediction, tests/gloo/test_emulated_plans.py.
EMULATED_TO_REAL = 0.06  # median of the relative errors
EMULATED_MEDIAN, EMULATED_P90 = 0.01, 0.03  # of the simulator's step
EMULATED_CHUNKED = 0.03  # the same, median, with chunks
GROWTH_BYTES = 4 << 20  # of a rank, in the last two thirds of many steps

# Equality with other programs: test_swapped.py, bench_deepspeed, bench_gpu, tests/gpu/, test_kernels.py; bench_costs.
SWAP_LOSS = 1e-6  # of FP32 losses, relative
SWAP_WEIGHTS = 1e-4  # of FP32 weights: Adam makes a step of what rounding leaves of a gradient that is nearly zero
FAMILIES_EQUAL = 160  # classes of models that are to be equal under all shapes
# Of 64 tokens a sequence. An earlier 0.5 and 0.65 were set against eager attention on a busy machine: the products and
# the attention alone, which a pack makes wider but not fewer, take 0.55 of what plain transformers take with SDPA.
PACKS_OVER_PLAIN = {"interface": 0.75, "boxes": 0.8, "hybrid": 0.6}
LONGER_PACKS_OVER_PLAIN = 1.0  # of 256
SINKS_TIME, SINKS_KEPT = {"none": 0.4, 128: 0.85}, 0.3  # by window: over probabilities in memory, from 2K tokens on
HEADS_TIME, HEADS_KEPT = {2: 0.7, 4: 0.45}, {2: 0.6, 4: 0.35}  # by ranks that share a layer: over the whole one
# Hybrids of published sizes, simulated: the longest sequence in slices over the longest whole one, and over that of the
# same model whose every layer attends; a step with slices over one without.
CUT_OVER_WHOLE, HYBRID_LONGEST, CUT_STEP = 4.0, 1.5, 1.0
SLICES_OF_STATES = 1e-9  # of loss and gradients in FP64, by the largest entry
OVER_DEEPSPEED = 1.0  # of a step's time or CPU time over plain DeepSpeed's
# Of a collected step's CPU time: one whose losses are read as they are; read otherwise, or logits: bench_reads.
READ_AS_IT_IS, READ = 1.1, 2.1
DEEPSPEED_AGREEMENT = 1e-5  # of loss and gradient norm from equal parameters in FP32
GPU_LOSS_AGREEMENT = 5e-3  # of the first step's loss: BF16, other orders of sums
GPU_ATTENTION = 2e-2  # BF16 against FP32, relative to the largest entry

# Post-training: tests/gloo/.
POST_TRAINING = 1e-9  # of losses, gradients, log-probabilities and entropies in FP64, by the largest entry
TRL_TRAINERS = 1e-6  # TRL's own head computes in FP32: of losses, and of parameters over how far they moved
LIVE_REWARD = 0.9  # of the last answers of a live run, in the mean; 0.5 at first, 1.0 at best
STAYS_ON_DEVICE = 0.02  # of an engine's bytes, when its states are on the host: tests/gloo/test_away.py
SCORES_MEMORY = 0.4  # over gathered logits, vocabulary 150K, 4K tokens, TP 4

# What runs cost: bench_checkpoint, bench_lnk, bench_planner, bench_costs, bench_gpu, test_edits.py, test_devices.py.
SAVE = 1.0  # the time and the bytes of a checkpoint over DeepSpeed's
SAVE_BY_DISK = 1.1  # the time over that of as many plain bytes, in the quick form
# 0.20 until the self-check itself took a tenth less time; what is added, mostly two runs of the longest sequence at
# hand, has not grown: 0.44 s of CPU beside 2.0, over eight ranks.
EDITS_AT_START, EDITS_IN_STEP = 0.25, 0.005  # what looks at a script's model and data, of the self-check, of a step
WATCHED_STEP = 1.01  # the time of a step with heartbeats and checks over one without
MOVED = 1.0  # the time of a transfer over gloo's for the same bytes
QUICK_MOVED = 1.05  # of two layers, in the quick form: a transfer of 17 ms was seen at 0.97 to 1.04
MODELS_ENTERED = 1.03  # times what has to enter a node: what does; twins of which it has one bring parts in twice
TRANSFER_PLAN_S = 1.0  # of CPU, an alarm: planning takes about a tenth of it
LAUNCHES = 0.6  # over the plain model's in a layer, and over ours without the functions
CHUNKED_WORK = {("list, slices", "tp2pp4"): 1.20, ("V, slices", "tp2pp4"): 1.16}  # a stage's time over pure work
EXPOSED = {25e9: 0.06, 50e9: 0.01}  # of a step, by bytes/s between nodes for each GPU: pulls and pushes
HAND_OUT_MS = 5.0  # of CPU, for the buffers of a step
OVER_ZERO_1 = 1.05  # of a 7B model's rank of 64: what it holds over what ZeRO-1 does, without activations
STATES = {4: 51.0, 2: 38.0}  # GB of a rank of 8*tp1 with a 7B model, by the bytes of an element of a gradient
GRADIENTS_BESIDE = 0.02  # of all that a rank has: what FP32 gradients may change beside the gradients
LOADING = 1.1  # the rise of a rank's peak over its masters and the largest parameter
HEAD_TIME, HEAD_PEAK = 1.2, 0.7  # of head and loss as one function, over a plain head's
HEAD = 1.1  # the error of a head's gradient in many blocks, to that in one
HEARTBEATS = 0.01  # of a core: seconds of CPU in a second
SOCKETS = 5  # of a rank whose groups connect when they talk; a group that connects all pairs takes 11
GROUPS, MEETINGS, PAIRS, GROUP_SOCKETS = 24, 24, 256, 64  # of a rank, or of all
GPU_LEFT_OVER = 256 * 2**20  # bytes after an engine was destroyed: cuBLAS keeps workspaces

# After a fault, by the clock: tests/gloo/, tests/pure/test_elastic_resume.py.
VIEW_MEDIAN_S, VIEW_WORST_S = 1.0, 3.0  # from a member's death to the others' next view, or from when it is frozen
PLAN_MEDIAN_S, PLAN_WORST_S = 1.5, 3.5  # from a member's death to the plan of the next step of those that are left
MATRIX_EVEN, MATRIX_EXPOSED = 1.1, 0.01  # an update by whole matrices on 64 devices: FLOPs of the busiest over even
# ones; its exposed messages over a step of 1M tokens (of 200K tokens 1.6 % at 7B)
LOSS_CPU_S, LOSS_MB, BEAT_LATE_S = 1.0, 10.0, 1.0  # one loss among 1,024 members, for the coordinator
CUT_ANEW_SHARES = 3.0  # of a rank's values and states: its own and a lost one's that move, and its new copy
COPIES_STEP = 1.05  # a step with copies of masters over one without
COPIES_EXPOSED = 0.01  # of a simulated step
COPIES_FORMULA = 0.001  # bytes sent and kept over 4 and 16 a parameter: shares are whole elements of each bucket
TURNS_RESIDENT = 1.05  # memory after many losses and joins, over that after some
DEAD_S, FROZEN_S = 3.0, 12.0  # until all ranks have ended, where one is dead, or stands still
